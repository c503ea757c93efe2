//! Checked products of a projection.

use rayon::ThreadPool;

use crate::gemm::layer::{self, Job, Projection};
use crate::types::Activations;
use crate::{Error, Result};

/// y = W x with each expert's own tokens, in one parallel region.
///
/// # Errors
/// [`Error::InvalidArgument`]: sizes do not match.
pub fn matmul_grouped(
    projection: &dyn Projection,
    x: Activations,
    offsets: &[usize],
    y: &mut [f32],
    pool: &ThreadPool,
) -> Result<()> {
    let shape = projection.shape();
    if offsets.len() != shape.experts + 1 || offsets[0] != 0 || !offsets.is_sorted() {
        let (offsets, experts) = (offsets.len(), shape.experts);
        return Err(Error::InvalidArgument(format!(
            "{offsets} offsets for {experts} experts: they must ascend from 0"
        )));
    }
    let tokens = offsets[shape.experts];
    if tokens.checked_mul(shape.columns) != Some(x.len()) || tokens.checked_mul(shape.rows) != Some(y.len()) {
        let (x, y) = (x.len(), y.len());
        return Err(Error::InvalidArgument(format!(
            "{x} activations and {y} outputs for {tokens} tokens of {shape:?}"
        )));
    }
    layer::multiply(projection, Job::of_offsets(offsets), x, y, pool);
    Ok(())
}
