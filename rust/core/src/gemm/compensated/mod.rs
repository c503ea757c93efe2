//! Products by compensated weights: y = Wq x + U (V x), the compensator read packed.
//!
//! A tensor is a [`layer::Projection`]: alone or in a layer of gated experts, a call is one parallel region. Beside what the
//! group-wise part prepares, the first stage gathers each task's activations in whole chunks, the second one is z = V x, a
//! few rows of V a unit. A unit of rows is then the group-wise product and y += U z. A row of V or U^T is unpacked 64
//! values at a time for up to 8 tokens that share it. Each z and each y is summed by one unit in a fixed order, so
//! results depend neither on the number of threads nor on the instruction set.
//!
//! Accuracy: z is a sum of C products in eight lanes, then y a sum of r; with u = 2^-24 and S the sum over ranks and
//! columns of |u v x|, the error of the compensator's part is at most (C / 8 + r + 16) u S.
//!
//! Scales and codes are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

mod kernel;
mod projection;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::Compensated;
use rayon::ThreadPool;

use super::groupwise::{self, Mode};
use super::layer;
use crate::Result;
use crate::formats::compensated::View;
use crate::simd::Isa;
use crate::types::Activations;

/// Tokens that share the unpacking of a chunk.
const TOKENS: usize = 8;

/// y = (Wq + U V) x with each expert's own tokens.
///
/// `x` is N x C sorted by expert; `offsets` has E + 1 entries that ascend from 0 to N; `y` is N x R. `mode` is that of
/// the group-wise part; the compensator always multiplies f32 activations.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error): sizes do not match, or the processor lacks the instruction set.
pub fn matmul_grouped<'a>(
    view: &View,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, projection) = (x.into(), Compensated::new(view.clone(), mode, isa)?);
    let job = groupwise::grouped(view.base(), x, offsets, y)?;
    layer::multiply(&projection, job, x, y, pool);
    Ok(())
}

/// y = (Wq + U V) x for all tokens of one expert: `x` is T x C, `y` is T x R.
///
/// # Errors
/// As [`matmul_grouped`], or there is no such expert.
#[allow(clippy::too_many_arguments)] // what a product is made of
pub fn matmul<'a>(
    view: &View,
    expert: usize,
    x: impl Into<Activations<'a>>,
    tokens: usize,
    y: &mut [f32],
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (x, projection) = (x.into(), Compensated::new(view.clone(), mode, isa)?);
    let job = groupwise::single(view.base(), expert, x, tokens, y)?;
    layer::multiply(&projection, job, x, y, pool);
    Ok(())
}

#[cfg(test)]
mod tests;
