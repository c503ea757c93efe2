//! Looking up single rows: what embeddings ask of a tensor.
//!
//! A row lies in a stream of 16 or 64, which is decoded from its start to the row's block: of 64 rows of 2,048 columns at
//! most 131,072 weights, and the bytes of no other stream are touched.

use rayon::ThreadPool;

use super::CodedView;
use crate::Result;
use crate::formats::rows;
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
        let streams = shape.rows.div_ceil(layout.stream_rows());
        let stream_of = |row: usize| row / shape.rows * streams + row % shape.rows / layout.stream_rows();
        rows::look_up(shape, rows, out, pool, stream_of, |named| {
            let (expert, stream) = (
                named[0].0 / shape.rows,
                named[0].0 % shape.rows / layout.stream_rows(),
            );
            let first = expert * shape.rows + stream * layout.stream_rows();
            let count = named[named.len() - 1].0 - first + 1;
            let (mut row, mut named) = (first, named.iter_mut().peekable());
            self.decode_stream(isa, expert, stream, count, |codes| {
                while let Some((_, out)) = named.next_if(|(number, _)| *number == row) {
                    put(row, codes, out);
                }
                row += 1;
                Ok(())
            })
        })
    }
}
