//! Memory that will be read next, fetched into the caches by threads that wait: memory is what bounds products of few
//! tokens, so it should not rest while one thread computes what lies between them.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::cut::Cut;
use super::{Job, Projection};
use crate::simd;

/// Most bytes that are fetched: half of a second-level cache.
const MOST: usize = 512 << 10;
/// Bytes that are asked for between two looks at what a thread waits for.
const CHUNK: usize = 4 << 10;

/// The memory of the first units of work of some products.
pub struct Ahead<'a> {
    runs: Vec<&'a [u8]>,
    chunks: usize,
    /// Chunks that have been handed out.
    next: AtomicUsize,
}

/// What products by a job read of matrices that are cut together: of each unit of work the rows of each matrix.
pub(super) fn runs<'s, 'a>(
    matrices: &'s [&'a dyn Projection],
    job: &'s Job,
    cut: &'s Cut,
) -> impl Iterator<Item = &'a [u8]> + 's {
    (0..cut.units(job)).flat_map(move |unit| {
        let (task, rows) = cut.at(unit);
        let expert = job.tasks[task].expert;
        matrices.iter().map(move |matrix| {
            let (memory, all) = (matrix.memory(expert), matrix.shape().rows);
            &memory[memory.len() * rows.start / all..memory.len() * rows.end / all]
        })
    })
}

impl<'a> Ahead<'a> {
    /// Runs of memory in the order in which they are read, as many of them as are worth fetching.
    pub(super) fn new(runs: impl Iterator<Item = &'a [u8]>) -> Ahead<'a> {
        let mut left = MOST;
        let runs = runs.map_while(|run| {
            let found = &run[..run.len().min(left)];
            left -= found.len();
            (!found.is_empty()).then_some(found)
        });
        let runs: Vec<_> = runs.collect();
        Ahead {
            chunks: runs.iter().map(|run| run.len().div_ceil(CHUNK)).sum(),
            runs,
            next: AtomicUsize::new(0),
        }
    }

    /// Asks for a little of the memory that nobody has asked for; false if there is none.
    pub(super) fn fetch(&self) -> bool {
        if self.next.load(Ordering::Relaxed) >= self.chunks {
            return false;
        }
        let mut chunk = self.next.fetch_add(1, Ordering::Relaxed);
        for run in &self.runs {
            if let Some(bytes) = run.chunks(CHUNK).nth(chunk) {
                simd::fetch(bytes);
                return true;
            }
            chunk -= run.len().div_ceil(CHUNK);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_fetched_once_up_to_the_most() {
        let memory = vec![0; MOST];
        for (sizes, chunks) in [
            (&[][..], 0),
            (&[0, 5], 0),
            (&[1, CHUNK, CHUNK + 1], 4),
            (&[MOST - 1, CHUNK, CHUNK], MOST / CHUNK + 1),
        ] {
            let ahead = Ahead::new(sizes.iter().map(|&size| &memory[..size]));
            assert_eq!(std::iter::from_fn(|| ahead.fetch().then_some(())).count(), chunks);
        }
    }
}
