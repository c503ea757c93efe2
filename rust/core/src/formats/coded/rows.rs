//! Looks up single rows, for embeddings.
//!
//! A row lies in a stream of 16 or 64 rows, which is decoded from its start to the row's block: for 64 rows of 2,048
//! columns at most 131,072 weights. Bytes of other streams are not touched.

use rayon::ThreadPool;

use super::view::CodedView;
use crate::Result;
use crate::formats::rows;
use crate::simd::Isa;

impl CodedView<'_> {
    /// Decodes the named rows, which are counted over all experts, in any order and with repetitions. `put` gets the
    /// number and the codes of a row and writes its part of `out`, which has one value per weight. Each stream is
    /// decoded once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if a row does not exist or `out` has another length.
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
