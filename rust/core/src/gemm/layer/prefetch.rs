//! Memory that will be read next, prefetched by threads that wait: memory is what bounds products of few tokens, so it
//! should not rest while one thread computes what lies between them.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::cut::{Cut, share};
use super::projection::Projection;
use super::routing::Job;
use crate::simd;

/// Most bytes that a thread prefetches: half of a second-level cache.
const MOST: usize = 512 << 10;
/// Bytes that are asked for between two looks at what a thread waits for.
const CHUNK: usize = 4 << 10;

/// The memory of the first units of work of some products: those that each thread of a region will do.
pub struct Prefetch<'a>(Vec<Start<'a>>);

/// The memory that one thread reads first.
struct Start<'a> {
    runs: Vec<&'a [u8]>,
    chunks: usize,
    /// Chunks that have been asked for.
    next: AtomicUsize,
}

/// What a unit of products by a job reads of matrices that are cut together: the rows of each matrix.
pub(super) fn memory<'a>(
    matrices: &[&'a dyn Projection],
    job: &Job,
    cut: &Cut,
    unit: usize,
) -> Vec<&'a [u8]> {
    let (task, rows) = cut.at(unit);
    let expert = job.tasks[task].expert;
    let memory = |matrix: &&'a dyn Projection| matrix.memory(expert, rows.clone());
    matrices.iter().map(memory).collect()
}

impl<'a> Prefetch<'a> {
    /// Products of `units` units, each of which reads some memory, by `threads` threads.
    pub(super) fn new(units: usize, threads: usize, memory: impl Fn(usize) -> Vec<&'a [u8]>) -> Prefetch<'a> {
        let start = |index| Start::new((share(units, index, threads).start..units).flat_map(&memory));
        Prefetch((0..threads).map(start).collect())
    }

    /// Asks for a little of the memory that is first for a thread; false if there is none.
    pub(super) fn ask(&self, thread: usize) -> bool {
        self.0.get(thread).is_some_and(Start::fetch)
    }
}

impl<'a> Start<'a> {
    /// Runs of memory in the order in which they are read, as many of them as are worth prefetching.
    fn new(runs: impl Iterator<Item = &'a [u8]>) -> Start<'a> {
        let mut left = MOST;
        let runs = runs.map_while(|run| {
            let found = &run[..run.len().min(left)];
            left -= found.len();
            (!found.is_empty()).then_some(found)
        });
        let runs: Vec<_> = runs.collect();
        Start {
            chunks: runs.iter().map(|run| run.len().div_ceil(CHUNK)).sum(),
            runs,
            next: AtomicUsize::new(0),
        }
    }

    fn fetch(&self) -> bool {
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
    fn each_chunk_is_prefetched_once_up_to_the_most() {
        let memory = vec![0; MOST];
        for (sizes, chunks) in [
            (&[][..], 0),
            (&[0, 5], 0),
            (&[1, CHUNK, CHUNK + 1], 4),
            (&[MOST - 1, CHUNK, CHUNK], MOST / CHUNK + 1),
        ] {
            let start = Start::new(sizes.iter().map(|&size| &memory[..size]));
            assert_eq!(std::iter::from_fn(|| start.fetch().then_some(())).count(), chunks);
        }
    }

    #[test]
    fn each_thread_prefetches_what_it_will_read() {
        let memory = vec![0; 3 * CHUNK];
        let prefetch = Prefetch::new(3, 2, |unit| vec![&memory[unit * CHUNK..][..CHUNK]]);
        let starts = [0, 1].map(|thread: usize| prefetch.0[thread].runs[0].as_ptr());
        assert_eq!(starts, [memory.as_ptr(), memory[CHUNK..].as_ptr()]);
        assert!(!prefetch.ask(2));
        assert_eq!((0..9).filter(|_| prefetch.ask(1)).count(), 2);
    }
}
