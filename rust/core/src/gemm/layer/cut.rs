//! Divides products into units of work: long runs of memory, but enough of them for even load.

use std::ops::Range;

use super::projection::Projection;
use super::routing::Job;

/// The maximum bytes of a unit of work, a run long enough for full memory bandwidth.
const UNIT_BYTES: usize = 512 << 10;
/// The minimum number of units per thread, if there are enough granules, for even load.
const UNITS: usize = 16;
/// The maximum number of outputs of a unit, which stay in the cache until they are written to their destination.
const UNIT_OUTPUTS: usize = 1 << 14;
/// The number of rows that a unit may have even for many tokens, because each unit reads the tokens again.
const HIGH_ROWS: usize = 256;
/// Jobs that read fewer bytes of weights run on the calling thread: waking another takes as long.
const ALONE_BYTES: usize = 16 << 10;

/// The division of the rows of a job's tasks into units.
pub(crate) struct Cut {
    step: usize,
    runs: usize,
    rows: usize,
}

impl Cut {
    pub fn new(projections: &[&dyn Projection], job: &Job, threads: usize) -> Cut {
        let rows = projections[0].shape().rows;
        let granule = projections
            .iter()
            .fold(1, |granule, p| multiple(granule, p.granule()));
        let bytes: usize = projections.iter().map(|p| p.row_bytes()).sum();
        // A single thread needs no even load.
        let least = if threads == 1 { 1 } else { UNITS * threads };
        let most = (UNIT_BYTES / bytes.max(1))
            .min((UNIT_OUTPUTS / job.widest().max(1)).max(HIGH_ROWS))
            .min(job.tasks.len() * rows / least);
        let wide = projections.iter().map(|p| p.wide()).max().unwrap_or(granule);
        let step = match (most / granule).max(1) * granule {
            step if step < wide => {
                // Fewer units per thread, of equal height.
                let each = (job.tasks.len() * rows).div_ceil(threads);
                let height = each.div_ceil((each / wide).max(1)).max(step);
                let even = rows.div_ceil(rows.div_ceil(height).max(1));
                even.next_multiple_of(granule).max(granule)
            }
            step => step,
        };
        Cut {
            step,
            runs: rows.div_ceil(step),
            rows,
        }
    }

    pub fn units(&self, job: &Job) -> usize {
        job.tasks.len() * self.runs
    }

    /// The task and rows of a unit.
    pub fn at(&self, unit: usize) -> (usize, Range<usize>) {
        let first = unit % self.runs * self.step;
        (unit / self.runs, first..(first + self.step).min(self.rows))
    }
}

/// The part of `count` units that belongs to thread `index` of `threads`.
pub(crate) fn share(count: usize, index: usize, threads: usize) -> Range<usize> {
    count * index / threads..count * (index + 1) / threads
}

/// The least common multiple of two positive numbers.
pub(crate) fn multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

/// Returns whether a job is too small to wake threads.
pub(crate) fn alone(projections: &[&dyn Projection], job: &Job) -> bool {
    let bytes = projections
        .iter()
        .map(|p| p.row_bytes().saturating_mul(p.shape().rows));
    bytes
        .fold(0, usize::saturating_add)
        .saturating_mul(job.list.len())
        < ALONE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_all_units_in_their_order() {
        for (count, threads) in [(0, 2), (1, 2), (7, 3), (48, 5)] {
            let units = (0..threads).flat_map(|index| share(count, index, threads));
            assert!(units.eq(0..count));
        }
    }
}
