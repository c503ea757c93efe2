//! Looking up single rows: what embeddings ask of a tensor.
//!
//! A row lies in a stream of 16 or 64, which is decoded from its start to the row's block: of 64 rows of 2,048 columns at
//! most 131,072 weights, and the bytes of no other stream are touched.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{CodedView, invalid};
use crate::Result;
use crate::simd::Isa;

impl CodedView<'_> {
    /// Decodes the named rows, numbers among all experts' rows, in any order and more than once: `put` makes of the codes
    /// of a row, whose number it gets, what belongs into its part of `out`, which has a place for each weight of a row.
    /// Each stream is decoded once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): there is no such row, or `out` has another length.
    pub fn look_up<T: Send>(
        &self,
        isa: Isa,
        rows: &[usize],
        out: &mut [T],
        pool: &ThreadPool,
        put: impl Fn(usize, &[i32], &mut [T]) + Sync,
    ) -> Result<()> {
        let (layout, shape) = (self.layout(), self.layout().shape());
        if let Some(row) = rows.iter().find(|&&row| row >= shape.experts * shape.rows) {
            return invalid(format!("there is no row {row} in {shape:?}"));
        }
        if rows.len().checked_mul(shape.columns) != Some(out.len()) {
            return invalid(format!(
                "{} places for {} rows of {shape:?}",
                out.len(),
                rows.len()
            ));
        }
        let mut places: Vec<(usize, &mut [T])> = rows
            .iter()
            .copied()
            .zip(out.chunks_exact_mut(shape.columns.max(1)))
            .collect();
        places.sort_unstable_by_key(|(row, _)| *row);
        let stream_of = |row: usize| (row / shape.rows, row % shape.rows / layout.stream_rows());
        let groups: Vec<_> = places
            .chunk_by_mut(|one, next| stream_of(one.0) == stream_of(next.0))
            .collect();
        let decode = |group: &mut [(usize, &mut [T])]| {
            let (expert, stream) = stream_of(group[0].0);
            let first = expert * shape.rows + stream * layout.stream_rows();
            let count = group[group.len() - 1].0 - first + 1;
            let (mut row, mut group) = (first, group.iter_mut().peekable());
            self.decode_stream(isa, expert, stream, count, |codes| {
                while let Some((_, out)) = group.next_if(|(named, _)| *named == row) {
                    put(row, codes, out);
                }
                row += 1;
                Ok(())
            })
        };
        pool.install(|| groups.into_par_iter().try_for_each(decode))
    }
}
