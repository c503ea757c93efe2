//! Products of a tensor of any format, with all arguments checked.

use rayon::ThreadPool;

use super::layer::{Job, Projection, Task, multiply};
use crate::types::Activations;
use crate::{Error, Result};

/// Computes y = W x for the tokens of one expert: `x` is tokens x columns, `y` is tokens x rows.
///
/// # Errors
/// [`Error::InvalidArgument`] if the expert does not exist or the sizes do not match.
pub fn matmul<'a>(
    weights: &dyn Projection,
    expert: usize,
    x: impl Into<Activations<'a>>,
    tokens: usize,
    y: &mut [f32],
    pool: &ThreadPool,
) -> Result<()> {
    let experts = weights.shape().experts;
    if expert >= experts {
        return invalid(format!("there is no expert {expert} of {experts}"));
    }
    let x = x.into();
    check_sizes(weights, x, tokens, y)?;
    let task = (tokens > 0).then_some(Task {
        expert,
        places: 0..tokens,
    });
    multiply(weights, Job::of_tasks(task.into_iter().collect()), x, y, pool);
    Ok(())
}

/// Computes y = W x with each expert's own tokens, in one parallel region.
///
/// `x` is tokens x columns and `y` tokens x rows, with tokens sorted by expert: expert e takes tokens
/// `offsets[e]..offsets[e + 1]`. There is one more offset than experts, ascending from 0 to the number of tokens.
/// Experts without tokens are not read.
///
/// # Errors
/// [`Error::InvalidArgument`] if the offsets are invalid or the sizes do not match.
pub fn matmul_grouped<'a>(
    weights: &dyn Projection,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    pool: &ThreadPool,
) -> Result<()> {
    let experts = weights.shape().experts;
    check_offsets(offsets, experts)?;
    let x = x.into();
    check_sizes(weights, x, offsets[experts], y)?;
    multiply(weights, Job::of_offsets(offsets), x, y, pool);
    Ok(())
}

/// Checks that there is one more offset than experts and that offsets ascend from 0.
pub(super) fn check_offsets(offsets: &[usize], experts: usize) -> Result<()> {
    if offsets.len() == experts + 1 && offsets[0] == 0 && offsets.is_sorted() {
        return Ok(());
    }
    let count = offsets.len();
    invalid(format!(
        "{count} offsets for {experts} experts: there must be one more offset than experts, ascending from 0"
    ))
}

fn check_sizes(weights: &dyn Projection, x: Activations, tokens: usize, y: &[f32]) -> Result<()> {
    let shape = weights.shape();
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
