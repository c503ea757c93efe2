//! The full check of a packed tensor, which [`TernaryView::parse`] leaves to the decoders.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{TernaryView, decode};
use crate::{Error, Result};

impl TernaryView<'_> {
    /// Decodes every row without storing it. On success every code exists in its state, every row covers exactly its
    /// columns, padding is zero, and the number of non-zeros equals the header's.
    ///
    /// # Errors
    /// [`Error::Corruption`] that names expert, row and byte.
    pub fn verify(&self, pool: &ThreadPool) -> Result<()> {
        self.check_padding()?;
        let nonzeros = pool.install(|| {
            (0..self.experts() * self.groups())
                .into_par_iter()
                .map(|unit| self.count_group(unit / self.groups(), unit % self.groups()))
                .try_reduce(|| 0, |a, b| Ok(a + b))
        })?;
        if nonzeros != self.nonzeros() {
            return Err(Error::Corruption(format!(
                "ternary tensor: {nonzeros} non-zero codes instead of {}",
                self.nonzeros()
            )));
        }
        Ok(())
    }

    fn count_group(&self, expert: usize, group: usize) -> Result<u64> {
        let mut nonzeros = 0;
        for placed in self.group_rows(expert, group) {
            let row = decode::visit(self, placed.codes, self.columns(), |_, _| ());
            nonzeros += row.map_err(|fault| fault.of_row(expert, placed.row))?;
        }
        Ok(nonzeros)
    }
}
