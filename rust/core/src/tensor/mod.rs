//! Packed tensors of any format behind one door: opened by their first eight bytes, checked, decoded, multiplied.
//!
//! A format is a room of [`crate::formats`] (its bytes) and one implementation of [`Format`] and [`Tensor`] here, listed
//! in [`registry`]. Whoever holds a packed tensor knows these two traits and nothing else: no caller asks which format
//! it has. [`register`] adds a format from outside of this crate.
//!
//! # Invariants
//! Opening checks as much as a product relies on (header, sizes, offsets, code tables) and nothing that costs a pass over
//! the codes; [`Tensor::verify`] checks every byte. A [`Tensor`] does not hold its bytes, because their owner (an array of
//! Python, a mapped file) cannot lend them for good: each method takes them again. They must be those that were opened;
//! other bytes give an error, wrong numbers or a panic, never an access outside of them.

mod channels;
mod codebook;
mod coded;
mod compensated;
mod details;
mod groupwise;
mod registry;
mod ternary;
mod values;

use std::ops::Range;

use rayon::ThreadPool;

pub use details::{Details, Value};
pub use registry::{format, formats, open, register};
pub use values::{Array, Floats, Numbers};

use crate::gemm::layer::Projection;
use crate::simd::Isa;
use crate::types::{Mode, Shape};
use crate::{Error, Result};

/// Bytes at the start of every packed tensor that say which format it is in.
pub const MAGIC_BYTES: usize = 8;

/// A way to store a tensor.
pub trait Format: Sync {
    /// The name that manifests use: `groupwise`.
    fn kind(&self) -> &'static str;

    /// The first eight bytes of each tensor.
    fn magic(&self) -> [u8; MAGIC_BYTES];

    /// The version of the layout that is written and read.
    fn version(&self) -> u16;

    /// The size in bytes of a tensor of this shape, everything counted. The specification is what [`Tensor::details`]
    /// says of such a tensor; what the size does not depend on may be left out.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: there is no such tensor, or the size depends on the codes.
    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize>;

    /// Checks whatever products rely on.
    ///
    /// # Errors
    /// [`Error::Corruption`] or [`Error::InsufficientData`]: the bytes are no such tensor.
    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>>;
}

/// A part of a format by name, and where its bytes lie in a tensor.
pub type Section = (&'static str, Range<usize>);

/// How a product computes.
#[derive(Debug, Clone, Copy)]
pub struct Compute {
    /// One of [`Tensor::modes`].
    pub mode: Mode,
    /// To how many bits activations are rounded in modes that round them; `None` leaves it to the tensor.
    pub activation_bits: Option<u8>,
    /// The instruction set.
    pub isa: Isa,
}

/// What opening a packed tensor finds. `data` are always the bytes that were opened.
pub trait Tensor: Send + Sync {
    /// The format that opened it.
    fn format(&self) -> &'static dyn Format;

    /// The format with what matters most of its specification, for people: `groupwise-4bit`.
    fn name(&self) -> String;

    /// Experts, rows, columns and axes.
    fn shape(&self) -> Shape;

    /// The size in bytes, everything counted.
    fn bytes(&self) -> usize;

    /// The specification, in a fixed order.
    fn details(&self) -> Details;

    /// The parts of the format behind the header, in order, for kernels that read them outside of this crate. Without
    /// an answer of its own a format is one part.
    fn sections(&self) -> Vec<Section> {
        vec![("data", 0..self.bytes())]
    }

    /// The modes that products have, at least one, the default first.
    fn modes(&self) -> &'static [Mode];

    /// Whether codes are signed bytes.
    fn has_signed_codes(&self) -> bool {
        false
    }

    /// Checks every byte.
    ///
    /// # Errors
    /// [`Error::Corruption`] that says where.
    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()>;

    /// Writes the codes, a byte each, E x R x C of them.
    ///
    /// # Errors
    /// [`Error::Corruption`]: codes contradict the format. [`Error::InvalidArgument`]: `out` has another length.
    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()>;

    /// Writes the values that the weights stand for, E x R x C of them.
    ///
    /// # Errors
    /// As [`Tensor::decode`].
    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()>;

    /// Writes the values of some of all experts' rows, n x C of them, in the order in which they are named, without
    /// decoding the whole tensor.
    ///
    /// # Errors
    /// As [`Tensor::decode`]. [`Error::InvalidArgument`]: there is no such row, or the format cannot.
    fn look_up(&self, _data: &[u8], _rows: &[usize], _out: Floats, _pool: &ThreadPool) -> Result<()> {
        let format = self.name();
        Err(Error::InvalidArgument(format!("{format} has no rows to look up")))
    }

    /// The stored parameters of a name: scales, levels, ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: this tensor has no such parameters.
    fn parameters(&self, data: &[u8], name: &str, pool: &ThreadPool) -> Result<Array>;

    /// The tensor as products read it ([`crate::gemm::matmul`], [`crate::gemm::layer`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the format has no such mode, or the processor lacks the instruction set.
    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>>;
}

/// Where the bytes of each expert's codes lie in a tensor: one run of bytes an expert, which products with other experts
/// do not read, and which nothing reads that opens the tensor. Everything else belongs to all experts.
///
/// # Errors
/// [`Error::InvalidArgument`]: the format has no kernel in portable code.
pub fn payloads(tensor: &dyn Tensor, data: &[u8]) -> Result<Vec<Range<usize>>> {
    let compute = Compute {
        mode: tensor.modes()[0],
        activation_bits: None,
        isa: Isa::Scalar,
    };
    let projection = tensor.projection(data, compute)?;
    let Shape { experts, rows, .. } = tensor.shape();
    let place = |expert| {
        let codes = projection.memory(expert, 0..rows);
        let start = match codes.is_empty() {
            true => 0,
            false => codes.as_ptr().addr() - data.as_ptr().addr(),
        };
        start..start + codes.len()
    };
    Ok((0..experts).map(place).collect())
}

/// The error of [`Tensor::parameters`].
fn no_parameters<T>(tensor: &dyn Tensor, name: &str, known: &[&str]) -> Result<T> {
    let (format, known) = (tensor.name(), known.join(", "));
    Err(Error::InvalidArgument(format!(
        "{format} has no parameters {name:?}: it has {known}"
    )))
}
