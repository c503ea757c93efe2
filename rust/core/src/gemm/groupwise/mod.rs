//! Products by group-wise integer weights, straight from the packed bytes.
//!
//! With the codes q of a row, scale s_g and offset o_g of its groups (of a symmetric tensor `o_g = -2^(bits-1) s_g`),
//! `y = sum over g of s_g * (sum of q x over g) + o_g * (sum of x over g)`: two multiplications a group beside the dot
//! product of codes and activations. Products are of integers: a token's activations are quantized for each *step* of
//! columns, symmetrically, by the largest of the step ([`Mode`]):
//!
//! * *int8*: to 8 bits, one plane of bytes.
//! * *exact*: to 24 bits, three planes of signed bytes, each worth 256 of the next. A product is three integer products,
//!   whose sum has the precision of single-precision arithmetic: an activation is off by at most 2^-23 of the step's
//!   largest. That is faster than floats on every processor but those without integer dot products, since four
//!   weights share an instruction, and it gives the same bits on every instruction set.
//!
//! A third mode, *bf16*, rounds activations to bf16 and multiplies panels of decoded weights ([`panels`]) where an expert
//! has many tokens, and is *exact* where it has few. What follows is about the other two.
//!
//! `sum of x` is that of the quantized activations, so that both terms err alike and the error is that of centred
//! weights. A step is a group, or 256 columns of a whole row: the columns over which products add up before they are
//! scaled. 256 * 128 * 255 < 2^24: the sum of a plane of a step is exact in f32.
//!
//! # How a product is cut
//! A block of 16 rows by all tokens of its expert is computed by one thread, tile after tile of tokens, and runs of
//! blocks of all experts are handed out in one parallel region ([`super::layer`]). The order of a sum depends on nothing but
//! the tensor, so results depend neither on the number of threads, nor on which tokens share a call, nor on the
//! instruction set.
//! The kernel is written once over [`lanes::Lanes`]; several tokens go through matrix registers where there are some
//! ([`matrix`]).
//!
//! # Accuracy
//! With u = 2^-24, S = sum of |s q x| + |o x| over the quantized activations and n steps, the error is at most
//! (2 n + 6) u S. A quantized activation is off by at most 1/254 (int8) or 2^-23 (exact) of the largest of its step, and
//! 3 u of itself. Where a step's largest activation is below 2^-100, the step counts as zero. A step with an activation
//! that is not finite makes its token's outputs NaN.
//!
//! Codes and parameters are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

mod drive;
mod kernel;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(test)]
mod panel_tests;
mod panels;
mod projection;
mod rounded;
mod scalar;
#[cfg(test)]
pub(super) mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::Groupwise;
use rayon::ThreadPool;

use super::layer::{self, Job, Task};
#[cfg(target_arch = "x86_64")]
use super::panel::Backend;
use crate::formats::groupwise::{BLOCK_ROWS, Blocks};
use crate::simd::Isa;
use crate::types::Activations;
use crate::{Error, Result};

/// Most columns of a step.
pub const STEP_COLUMNS: usize = 256;

/// What a kernel writes: a tile of tokens by the rows of a block.
type Out = [[f32; BLOCK_ROWS]; 16];

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// With 24 bits, for each token and step.
    Exact,
    /// With 8 bits, for each token and step.
    Int8,
    /// Rounded to bf16; experts with few tokens as [`Mode::Exact`].
    Bf16,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 3] = [Mode::Exact, Mode::Int8, Mode::Bf16];
    /// The modes of integer products, which give the same bits on every instruction set.
    pub const INTEGER: [Mode; 2] = [Mode::Exact, Mode::Int8];

    /// Bytes of a quantized activation, each of which is a plane.
    fn planes(self) -> usize {
        match self {
            Mode::Exact | Mode::Bf16 => 3,
            Mode::Int8 => 1,
        }
    }

    /// What the largest activation of a step becomes: 127 in the first plane, zeros below.
    fn largest(self) -> f32 {
        match self {
            Mode::Exact | Mode::Bf16 => 127.0 * 65536.0,
            Mode::Int8 => 127.0,
        }
    }

    /// The name that Python uses.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Int8 => "int8",
            Mode::Bf16 => "bf16",
        }
    }

    /// Parses [`Mode::name`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: there is no such mode.
    pub fn from_name(name: &str) -> Result<Mode> {
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| Error::InvalidArgument(format!("the mode is exact, int8 or bf16, not {name:?}")))
    }
}

/// What computes a product on this processor with an instruction set that it runs.
pub fn kernel_name(isa: Isa) -> &'static str {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if x86::has_avx_vnni() => "avx-vnni",
        Isa::Avx512 if Backend::of_bf16(isa).is_some() => "avx512-vnni, avx512-bf16 in the mode bf16",
        Isa::Avx512 => "avx512-vnni",
        Isa::Amx => "avx512-vnni, amx-int8 for 5 tokens and more, amx-bf16 in the mode bf16",
        _ => isa.name(),
    }
}

/// y = W x with each expert's own tokens, in one parallel region.
///
/// `x` is N x C sorted by expert; `offsets` has E + 1 entries that ascend from 0 to N; `y` is N x R.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match, or the processor lacks the instruction set.
pub fn matmul_grouped<'a>(
    view: &dyn Blocks,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, projection) = (x.into(), Groupwise::new(view, mode, isa)?);
    let job = grouped(view, x, offsets, y)?;
    layer::multiply(&projection, job, x, y, pool);
    Ok(())
}

/// y = W x for all tokens of one expert: `x` is T x C, `y` is T x R.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match, there is no such expert, or the processor lacks the set.
#[allow(clippy::too_many_arguments)] // what a product is made of
pub fn matmul<'a>(
    view: &dyn Blocks,
    expert: usize,
    x: impl Into<Activations<'a>>,
    tokens: usize,
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, projection) = (x.into(), Groupwise::new(view, mode, isa)?);
    let job = single(view, expert, x, tokens, y)?;
    layer::multiply(&projection, job, x, y, pool);
    Ok(())
}

/// The job of a grouped product whose sizes fit.
pub(super) fn grouped(view: &dyn Blocks, x: Activations, offsets: &[usize], y: &[f32]) -> Result<Job> {
    let shape = view.layout().shape();
    let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
    if offsets.len() != shape.experts + 1 || !ascending {
        return invalid(format!(
            "{} offsets for {} experts: they must ascend from 0",
            offsets.len(),
            shape.experts
        ));
    }
    check(view, x, offsets[shape.experts], y)?;
    Ok(Job::of_offsets(offsets))
}

/// The job of one expert's product whose sizes fit.
pub(super) fn single(
    view: &dyn Blocks,
    expert: usize,
    x: Activations,
    tokens: usize,
    y: &[f32],
) -> Result<Job> {
    let experts = view.layout().shape().experts;
    if expert >= experts {
        return invalid(format!("there is no expert {expert} of {experts}"));
    }
    check(view, x, tokens, y)?;
    let task = (tokens > 0).then_some(Task {
        expert,
        places: 0..tokens,
    });
    Ok(Job::of_tasks(task.into_iter().collect()))
}

fn check(view: &dyn Blocks, x: Activations, tokens: usize, y: &[f32]) -> Result<()> {
    let shape = view.layout().shape();
    if tokens.checked_mul(shape.columns) == Some(x.len()) && tokens.checked_mul(shape.rows) == Some(y.len()) {
        return Ok(());
    }
    let (inputs, outputs) = (x.len(), y.len());
    invalid(format!(
        "{inputs} activations and {outputs} outputs for {tokens} tokens of {shape:?}"
    ))
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
