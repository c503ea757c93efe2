//! The full check of a tensor, which parsing leaves out.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{BLOCK_ROWS, View, corrupt};
use crate::Result;
use crate::bits::UNIT;

impl View<'_> {
    /// Checks that parameters are finite and that all padding of rows, columns and parameters is zero.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) that names the expert and the row.
    pub fn verify(&self, pool: &ThreadPool) -> Result<()> {
        let layout = self.layout();
        let blocks = layout.blocks();
        pool.install(|| {
            (0..layout.shape().experts * blocks)
                .into_par_iter()
                .try_for_each(|block| self.check_block(block / blocks, block % blocks))
        })
    }

    fn check_block(&self, expert: usize, number: usize) -> Result<()> {
        let layout = self.layout();
        let block = self.block(expert * layout.blocks() + number);
        let record = layout.record();
        for (number, (parameters, _)) in layout.records(block).enumerate() {
            let groups = record.groups.min(layout.groups() - number * record.groups);
            if parameters[groups * record.group_bytes..].iter().any(|&b| b != 0) {
                return corrupt(format!(
                    "expert {expert}: padding after the parameters is not zero"
                ));
            }
        }
        let rows = layout.shape().rows - number * BLOCK_ROWS;
        for lane in 0..BLOCK_ROWS {
            let place = || format!("expert {expert} row {}", number * BLOCK_ROWS + lane);
            match lane < rows {
                true => self.check_row(block, lane, place)?,
                false => self.check_padding_row(block, lane, place)?,
            }
        }
        Ok(())
    }

    fn check_row(&self, block: &[u8], lane: usize, place: impl Fn() -> String) -> Result<()> {
        let layout = self.layout();
        for group in 0..layout.groups() {
            let (scale, offset) = self.layout().block_parameters(block, lane, group);
            if !scale.is_finite() || !(layout.spec().symmetric || offset.is_finite()) {
                let place = place();
                return corrupt(format!(
                    "{place}: scale {scale} and offset {offset} of group {group} are not both finite"
                ));
            }
        }
        let columns = layout.shape().columns;
        let padded = !columns.is_multiple_of(UNIT)
            && self.layout().unit(block, lane, columns / UNIT)[columns % UNIT..]
                .iter()
                .any(|&code| code != 0);
        match padded {
            true => corrupt(format!("{}: codes after the last column are not zero", place())),
            false => Ok(()),
        }
    }

    fn check_padding_row(&self, block: &[u8], lane: usize, place: impl Fn() -> String) -> Result<()> {
        let empty = self.layout().records(block).all(|(parameters, codes)| {
            let mut halves = parameters
                .as_chunks::<2>()
                .0
                .iter()
                .skip(lane)
                .step_by(BLOCK_ROWS);
            let mut words = codes.as_chunks::<4>().0.iter().skip(lane).step_by(BLOCK_ROWS);
            halves.all(|&half| half == [0; 2]) && words.all(|&word| word == [0; 4])
        });
        match empty {
            true => Ok(()),
            false => corrupt(format!("{}: bytes after the last row are not zero", place())),
        }
    }
}
