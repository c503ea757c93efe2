//! Reading single rows of a tensor: what embeddings ask for, and products by the transposed weights.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::types::Shape;
use crate::{Error, Result};

/// A row's number among all experts' rows, and the place of its values.
pub(crate) type Named<'a, T> = (usize, &'a mut [T]);

/// Fills `out`, n x C places, with the n named rows, in any order and more than once. Rows with the same `group`, which is
/// ascending, come together, so that what they share is decoded once: `decode` gets them in ascending order.
///
/// # Errors
/// [`Error::InvalidArgument`]: there is no such row, or `out` has another length; and the errors of `decode`.
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
        return invalid(format!("{places} places for {count} rows of {shape:?}"));
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
