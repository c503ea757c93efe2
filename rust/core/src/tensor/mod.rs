//! A common interface to packed tensors of all formats: opened by their first eight bytes, checked, decoded,
//! multiplied.
//!
//! A format is a module of [`crate::formats`] (its bytes) and one implementation of [`Format`] and [`Tensor`] here,
//! listed in [`registry`]. Users of packed tensors depend only on these two traits, never on the format. [`register`]
//! adds a format from outside of this crate.
//!
//! # Invariants
//! Opening checks everything that products rely on (header, sizes, offsets, code tables) but makes no pass over the
//! codes; [`Tensor::verify`] checks every byte. A [`Tensor`] does not hold its bytes, because their owner (a Python
//! array, a mapped file) cannot lend them permanently; each method takes them again. They must be the bytes that were
//! opened; other bytes give an error, wrong numbers or a panic, but never an out-of-bounds access.

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

/// The number of bytes at the start of every packed tensor that identify its format.
pub const MAGIC_BYTES: usize = 8;

/// A packed format.
pub trait Format: Sync {
    /// The name in manifests: `groupwise`.
    fn kind(&self) -> &'static str;

    /// The first eight bytes of each tensor.
    fn magic(&self) -> [u8; MAGIC_BYTES];

    /// The version of the layout.
    fn version(&self) -> u16;

    /// The size in bytes of a tensor of this shape, everything included. The specification is that of
    /// [`Tensor::details`]; values that do not affect the size may be omitted.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor, or if the size depends on the codes.
    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize>;

    /// Checks everything that products rely on.
    ///
    /// # Errors
    /// [`Error::Corruption`] or [`Error::InsufficientData`] if the bytes are not such a tensor.
    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>>;
}

/// A named part of a format, and the range of its bytes in a tensor.
pub type Section = (&'static str, Range<usize>);

/// The computation of a product.
#[derive(Debug, Clone, Copy)]
pub struct Compute {
    /// One of [`Tensor::modes`].
    pub mode: Mode,
    /// The bits of rounded activations, in modes that round them; `None` uses the tensor's default.
    pub activation_bits: Option<u8>,
    /// The instruction set.
    pub isa: Isa,
}

/// An open packed tensor. `data` is always the bytes that were opened.
pub trait Tensor: Send + Sync {
    /// The format that opened it.
    fn format(&self) -> &'static dyn Format;

    /// The format with the main part of its specification, for people: `groupwise-4bit`.
    fn name(&self) -> String;

    /// Experts, rows, columns and axes.
    fn shape(&self) -> Shape;

    /// The size in bytes, everything included.
    fn bytes(&self) -> usize;

    /// The specification, in a fixed order.
    fn details(&self) -> Details;

    /// The parts of the format after the header, in order, for kernels outside of this crate. By default, a single
    /// part.
    fn sections(&self) -> Vec<Section> {
        vec![("data", 0..self.bytes())]
    }

    /// The supported compute modes, at least one, the default first.
    fn modes(&self) -> &'static [Mode];

    /// Whether codes are signed bytes.
    fn has_signed_codes(&self) -> bool {
        false
    }

    /// Checks every byte.
    ///
    /// # Errors
    /// [`Error::Corruption`] that names the position.
    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()>;

    /// Writes the codes, one byte each, E x R x C of them.
    ///
    /// # Errors
    /// [`Error::Corruption`] if codes contradict the format, [`Error::InvalidArgument`] if `out` has another length.
    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()>;

    /// Writes the dequantized values, E x R x C of them.
    ///
    /// # Errors
    /// As [`Tensor::decode`].
    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()>;

    /// Writes the values of some rows, counted over all experts, n x C of them, in the given order, without decoding
    /// the whole tensor.
    ///
    /// # Errors
    /// As [`Tensor::decode`]. [`Error::InvalidArgument`] if a row does not exist or the format does not support it.
    fn look_up(&self, _data: &[u8], _rows: &[usize], _out: Floats, _pool: &ThreadPool) -> Result<()> {
        let format = self.name();
        Err(Error::InvalidArgument(format!("{format} has no rows to look up")))
    }

    /// The stored parameters of a name: scales, levels, ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this tensor has no such parameters.
    fn parameters(&self, data: &[u8], name: &str, pool: &ThreadPool) -> Result<Array>;

    /// The tensor as an operand of products ([`crate::gemm::matmul`], [`crate::gemm::layer`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the format has no such mode or the processor lacks the instruction set.
    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>>;
}

/// The byte range of each expert's codes: one contiguous range per expert. Products with other experts and opening
/// the tensor do not read it. All other bytes belong to all experts.
///
/// # Errors
/// [`Error::InvalidArgument`] if the format has no portable kernel.
pub fn payloads(tensor: &dyn Tensor, data: &[u8]) -> Result<Vec<Range<usize>>> {
    let compute = Compute {
        mode: tensor.modes()[0],
        activation_bits: None,
        isa: Isa::SCALAR,
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
