//! The full check of a tensor, which parsing leaves out.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::decode::decode;
use super::planes::{are_within, lows};
use super::register::Register;
use super::view::CodedView;
use super::{BLOCK_ROWS, LANES, QUAD, corrupt};
use crate::Result;
use crate::simd::Isa;

impl CodedView<'_> {
    /// Checks that row and column scales are finite, that exceptions ascend, belong to weights and change them, and,
    /// by decoding everything, that each stream ends with its last byte and each lane in the initial state of
    /// encoding.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) that names the expert and the row.
    pub fn verify(&self, isa: Isa, pool: &ThreadPool) -> Result<()> {
        let layout = self.layout();
        let scales = (0..layout.scales()).find(|&row| !self.scale(row).is_finite());
        if let Some(row) = scales {
            return corrupt(format!(
                "scale {} of row {row}, counted over all experts, is not finite",
                self.scale(row)
            ));
        }
        let columns = self.column_scales();
        if let Some(place) = columns.iter().position(|scale| !scale.is_finite()) {
            let column = place % layout.shape().columns;
            return corrupt(format!(
                "scale {} of column {column} is not finite",
                columns[place]
            ));
        }
        let streams = layout.streams();
        let check = |number: usize| {
            let (expert, stream) = (number / streams, number % streams);
            let checked = self.check_exceptions(number, stream);
            let checked = checked.and_then(|()| self.check_stream(isa, number, stream));
            let checked = checked.and_then(|()| self.check_planes(isa, number, stream));
            checked.or_else(|what| {
                corrupt(format!(
                    "expert {expert}, rows from {}: {what}",
                    stream * layout.stream_rows()
                ))
            })
        };
        let numbers = 0..layout.shape().experts * streams;
        pool.install(|| numbers.into_par_iter().try_for_each(check))
    }

    fn check_exceptions(&self, number: usize, stream: usize) -> std::result::Result<(), String> {
        let mut least = 0;
        for exception in self.exceptions(number) {
            let place = exception.place;
            if place < least || exception.difference == 0 || self.locate(stream, place).is_none() {
                return Err(format!("the exception at {place} is out of place"));
            }
            least = place + 1;
        }
        Ok(())
    }

    fn check_planes(&self, isa: Isa, number: usize, stream: usize) -> std::result::Result<(), String> {
        let (layout, columns) = (self.layout(), self.layout().shape().columns);
        let places =
            (0..layout.stream_blocks()).flat_map(|block| (0..layout.quads()).map(move |quad| (block, quad)));
        let mut low_bits = [Register::ZERO];
        for (place, (block, quad)) in places.enumerate() {
            let rows = layout.rows_of(stream, block);
            if layout.low_bits() == 0 || rows == 0 {
                return Ok(());
            }
            lows(isa, self.planes(number, place..place + 1), &mut low_bits);
            if !are_within(&low_bits[0], rows, columns - quad * QUAD) {
                return Err("padding has low bits".into());
            }
        }
        Ok(())
    }

    fn check_stream(&self, isa: Isa, number: usize, stream: usize) -> std::result::Result<(), String> {
        let layout = self.layout();
        let mut chain = self.chain(number);
        let mut rows = layout.rows_of(stream, 0);
        if !chain.is_silent(rows..BLOCK_ROWS) {
            return Err("lanes without rows have states".into());
        }
        let mut registers = [Register::ZERO; LANES];
        for block in 0..layout.blocks {
            chain.start_block(rows);
            for first in (0..layout.quads()).step_by(LANES) {
                let count = LANES.min(layout.quads() - first);
                decode(isa, std::slice::from_mut(&mut chain), count, &mut registers);
            }
            let next = match block + 1 < layout.blocks {
                true => layout.rows_of(stream, block + 1),
                false => 0,
            };
            if !chain.is_initial(next..rows) {
                return Err("a lane does not end in the initial state".into());
            }
            rows = next;
        }
        match chain.is_read() {
            true => Ok(()),
            false => Err("the stream does not end with its last byte".into()),
        }
    }
}
