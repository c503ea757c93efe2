//! Reads single rows of a tensor, for embeddings and for products with the transposed weights.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::types::Shape;
use crate::{Error, Result};

/// The index of a row, counted over all experts, and the destination of its values.
pub(crate) type Named<'a, T> = (usize, &'a mut [T]);

/// Fills `out`, n x C values, with the n named rows, in any order and with repetitions. Rows of the same `group` are
/// decoded by one call of `decode`, in ascending order, so that work they share is done once; `group` must be
/// ascending in the row.
///
/// # Errors
/// [`Error::InvalidArgument`] if a row does not exist or `out` has another length; errors of `decode`.
pub(crate) fn look_up<T: Send>(
    shape: Shape,
    rows: &[usize],
    out: &mut [T],
    pool: &ThreadPool,
    group: impl Fn(usize) -> usize,
    decode: impl Fn(&mut [Named<T>]) -> Result<()> + Sync,
) -> Result<()> {
    if let Some(row) = rows.iter().find(|&&row| Some(row) >= shape.all_rows()) {
        return invalid(format!("there is no row {row} in {shape:?}"));
    }
    if rows.len().checked_mul(shape.columns) != Some(out.len()) {
        let (places, count) = (out.len(), rows.len());
        return invalid(format!(
            "the output has {places} values for {count} rows of {shape:?}"
        ));
    }
    let places = out.chunks_exact_mut(shape.columns.max(1));
    let mut named: Vec<Named<T>> = rows.iter().copied().zip(places).collect();
    named.sort_unstable_by_key(|(row, _)| *row);
    let groups = named.chunk_by_mut(|one, next| group(one.0) == group(next.0));
    let groups: Vec<_> = groups.collect();
    pool.install(|| groups.into_par_iter().try_for_each(&decode))
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
