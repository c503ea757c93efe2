//! Prefetching by waiting threads: products of few tokens are bound by memory, which should not idle while one thread
//! computes intermediate results.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::cut::{Cut, share};
use super::projection::Projection;
use super::routing::Job;
use crate::simd;

/// The maximum bytes that a thread prefetches: half of a second-level cache.
const MOST: usize = 512 << 10;
/// The bytes prefetched between two checks of the condition that a thread waits for.
const CHUNK: usize = 4 << 10;

/// The memory that the first units of work of each thread will read.
pub struct Prefetch<'a>(Vec<Start<'a>>);

/// The memory that one thread reads first.
struct Start<'a> {
    runs: Vec<&'a [u8]>,
    chunks: usize,
    /// The number of chunks already prefetched.
    next: AtomicUsize,
}

/// The memory that a unit reads of matrices that are divided together: the rows of each matrix.
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
    /// The prefetch for `units` units on `threads` threads; `memory` gives the memory that a unit reads.
    pub(super) fn new(units: usize, threads: usize, memory: impl Fn(usize) -> Vec<&'a [u8]>) -> Prefetch<'a> {
        let start = |index| Start::new((share(units, index, threads).start..units).flat_map(&memory));
        Prefetch((0..threads).map(start).collect())
    }

    /// Prefetches the next chunk of a thread's memory; returns false if there is none.
    pub(super) fn ask(&self, thread: usize) -> bool {
        self.0.get(thread).is_some_and(Start::fetch)
    }
}

impl<'a> Start<'a> {
    /// Takes runs of memory in reading order, up to the limit worth prefetching.
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
    fn each_thread_prefetches_its_own_memory() {
        let memory = vec![0; 3 * CHUNK];
        let prefetch = Prefetch::new(3, 2, |unit| vec![&memory[unit * CHUNK..][..CHUNK]]);
        let starts = [0, 1].map(|thread: usize| prefetch.0[thread].runs[0].as_ptr());
        assert_eq!(starts, [memory.as_ptr(), memory[CHUNK..].as_ptr()]);
        assert!(!prefetch.ask(2));
        assert_eq!((0..9).filter(|_| prefetch.ask(1)).count(), 2);
    }
}
