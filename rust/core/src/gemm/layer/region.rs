//! Several phases of work in one parallel region: threads that are done with a phase wait for it at a spinning barrier,
//! and may prefetch memory meanwhile ([`Prefetch`]).
//!
//! Waking a sleeping thread costs more than a phase of few activations, so a call wakes threads once. A phase has ended
//! when all its units have, not when all threads have taken part: a thread that arrives late, or never because it
//! computes something else, holds up nobody.
//!
//! Each thread has a share of a phase's units, which it does in their order: units beside each other lie beside each other
//! in memory, and what is prefetched at the end of one is the start of the next. A thread that has finished its share
//! does what others have not begun of theirs.
//!
//! Every thread goes through the same phases in the same order, and the region makes the counters of a phase when the
//! first thread reaches it. How many units a phase has may depend on earlier phases' results, for all threads see them
//! alike.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::ThreadPool;

use super::cut::share;
use super::prefetch::Prefetch;
use crate::workers;

/// Which threads go through a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    Own,
    /// As many as the pool has: the calling thread, and workers.
    All,
    /// As many, for a region that others follow soon.
    Awake,
}

impl Threads {
    /// The threads that are worth waking for so many tokens; after one token others follow.
    pub fn of(alone: bool, tokens: usize) -> Threads {
        match (alone, tokens) {
            (true, _) => Threads::Own,
            (false, 1) => Threads::Awake,
            (false, _) => Threads::All,
        }
    }
}

/// Phases whose counters the first run of them has; each further run has twice as many.
const FIRST_RUN: usize = 8;
/// Runs that hold more phases than a program can count.
const RUNS: usize = usize::BITS as usize - FIRST_RUN.trailing_zeros() as usize;

/// Counters of phases, made run by run when they are needed, so that they never move.
struct Counters {
    threads: usize,
    runs: [OnceLock<Box<[AtomicUsize]>>; RUNS],
}

impl Counters {
    fn new(threads: usize) -> Counters {
        let runs = [const { OnceLock::new() }; RUNS];
        Counters { threads, runs }
    }

    /// The units of a phase that are done, and those that have been handed out of each thread's share.
    fn of(&self, phase: usize) -> (&AtomicUsize, &[AtomicUsize]) {
        let run = (phase / FIRST_RUN + 1).ilog2() as usize;
        let (first, width) = (FIRST_RUN * ((1 << run) - 1), 1 + self.threads);
        let zeros = || {
            (0..(FIRST_RUN << run) * width)
                .map(|_| AtomicUsize::new(0))
                .collect()
        };
        let counters = &self.runs[run].get_or_init(zeros)[(phase - first) * width..][..width];
        (&counters[0], &counters[1..])
    }
}

/// What the threads of a region share.
struct Region {
    counters: Counters,
    /// Threads that have entered.
    entered: AtomicUsize,
    broken: AtomicBool,
}

/// Tells the others if its thread panics, so that they do not wait for ever.
struct Watch<'a>(&'a AtomicBool);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Release);
        }
    }
}

/// A thread on its way through the phases of a region.
pub struct Thread<'r, 'a> {
    region: &'r Region,
    index: usize,
    next: usize,
    prefetch: Option<&'a Prefetch<'a>>,
}

/// Runs `work` on as many threads as the pool has, or on the calling one alone.
pub fn run<'a>(pool: &ThreadPool, threads: Threads, work: impl Fn(&mut Thread<'_, 'a>) + Sync) {
    let count = match threads {
        Threads::Own => 1,
        _ => pool.current_num_threads(),
    };
    let region = Region {
        counters: Counters::new(count),
        entered: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    };
    let enter = || {
        let _watch = Watch(&region.broken);
        work(&mut Thread {
            region: &region,
            index: region.entered.fetch_add(1, Ordering::Relaxed) % count,
            next: 0,
            prefetch: None,
        })
    };
    match count {
        1 => enter(),
        _ => workers::run(count - 1, threads == Threads::Awake, &enter),
    }
}

impl<'a> Thread<'_, 'a> {
    /// Sets what to prefetch from now on while there is nothing else to do.
    pub fn prefetch(&mut self, prefetch: Option<&'a Prefetch<'a>>) {
        self.prefetch = prefetch;
    }

    /// Takes part in the next phase, of `count` units, and returns when all of them are done: what they wrote is visible
    /// then. All threads give the same count.
    pub fn phase(&mut self, count: usize, mut work: impl FnMut(usize)) {
        let threads = self.region.counters.threads;
        let (done, taken) = self.region.counters.of(self.next);
        self.next += 1;
        for index in (self.index..threads).chain(0..self.index) {
            let share = share(count, index, threads);
            while taken[index].load(Ordering::Relaxed) < share.len() {
                let unit = taken[index].fetch_add(1, Ordering::Relaxed);
                if unit < share.len() {
                    work(share.start + unit);
                    done.fetch_add(1, Ordering::Release);
                }
            }
        }
        self.wait(done, count);
    }

    /// A phase of one unit, which makes a value.
    pub fn once<'v, T>(&mut self, slot: &'v OnceLock<T>, make: impl FnOnce() -> T) -> &'v T {
        let mut make = Some(make);
        self.phase(1, |_| {
            slot.get_or_init(make.take().expect("a phase hands out a unit once"));
        });
        slot.get().expect("the phase has ended")
    }

    fn wait(&self, done: &AtomicUsize, count: usize) {
        let mut rounds = 0;
        while done.load(Ordering::Acquire) < count {
            let broken = self.region.broken.load(Ordering::Acquire);
            assert!(!broken, "another thread panicked");
            if !self.prefetch.is_some_and(|prefetch| prefetch.ask(self.index)) {
                workers::relax(&mut rounds);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> ThreadPool {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap()
    }

    #[test]
    fn a_phase_sees_all_of_the_phase_before() {
        let counts = [100, 1, 0, 57];
        for threads in [1, 2, 5] {
            let done: Vec<AtomicUsize> = counts.iter().map(|_| AtomicUsize::new(0)).collect();
            run(&pool(threads), Threads::All, |thread| {
                for number in 0..counts.len() {
                    thread.phase(counts[number], |unit| {
                        assert!(unit < counts[number]);
                        for (before, &count) in done[..number].iter().zip(&counts) {
                            assert_eq!(before.load(Ordering::Relaxed), count);
                        }
                        done[number].fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
            let found: Vec<usize> = done.iter().map(|d| d.load(Ordering::Relaxed)).collect();
            assert_eq!(found, counts);
        }
    }

    #[test]
    fn a_value_is_made_once_and_seen_by_all() {
        for threads in [1, 2, 5] {
            let (slot, made) = (OnceLock::new(), AtomicUsize::new(0));
            let done = AtomicUsize::new(0);
            run(&pool(threads), Threads::Awake, |thread| {
                let &count = thread.once(&slot, || made.fetch_add(1, Ordering::Relaxed) + 7);
                thread.phase(count, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!([made.into_inner(), done.into_inner()], [1, 7]);
        }
    }

    #[test]
    fn a_panic_ends_the_region() {
        let pool = pool(3);
        let run = || {
            run(&pool, Threads::Awake, |thread| {
                thread.phase(8, |unit| assert_ne!(unit, 5));
                thread.phase(8, |_| ());
            });
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
    }

    #[test]
    fn a_region_has_any_number_of_phases() {
        let done = AtomicUsize::new(0);
        run(&pool(3), Threads::All, |thread| {
            for phase in 0..1000 {
                thread.phase(3, |_| {
                    done.fetch_add(phase, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(done.into_inner(), 3 * 999 * 500);
    }
}
