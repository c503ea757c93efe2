//! Runs several phases of work in one parallel region: threads that finish a phase wait for its end ([`Event`]) and may
//! prefetch memory meanwhile ([`Prefetch`]).
//!
//! Waking a sleeping thread costs more than a phase of few activations, so a call wakes threads once. A phase ends
//! when all its units are done, not when all threads have taken part: a thread that arrives late, or never because it
//! is busy elsewhere, delays no other.
//!
//! Each thread has a share of a phase's units, which it computes in order: consecutive units are contiguous in
//! memory, and the hardware prefetch at the end of one reaches the start of the next. A thread that has finished its
//! share takes over units of other threads that have not been started.
//!
//! Every thread goes through the same phases in the same order, and the first thread to reach a phase creates its
//! counters. The number of units of a phase may depend on the results of earlier phases, because all threads see the
//! same results.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::ThreadPool;

use super::cut::share;
use super::prefetch::Prefetch;
use crate::waiting::Event;
use crate::workers;

/// The threads that take part in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    Own,
    /// All threads of the pool: the calling thread and the workers.
    All,
    /// Like `All`, for a region that others follow soon.
    Awake,
}

impl Threads {
    /// The threads worth waking for a number of tokens; a single token is usually followed by others.
    pub fn of(alone: bool, tokens: usize) -> Threads {
        match (alone, tokens) {
            (true, _) => Threads::Own,
            (false, 1) => Threads::Awake,
            (false, _) => Threads::All,
        }
    }
}

/// The number of phases in the first run of counters; each further run has twice as many.
const FIRST_RUN: usize = 8;
/// The number of runs, which together hold more phases than a program can count.
const RUNS: usize = usize::BITS as usize - FIRST_RUN.trailing_zeros() as usize;

/// Counters of phases, allocated run by run on demand, so that they never move.
struct Counters {
    threads: usize,
    runs: [OnceLock<Box<[AtomicUsize]>>; RUNS],
}

impl Counters {
    fn new(threads: usize) -> Counters {
        let runs = [const { OnceLock::new() }; RUNS];
        Counters { threads, runs }
    }

    /// The number of a phase's units that are done, and the numbers of units handed out from each thread's share.
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

/// The shared state of a region.
struct Region {
    counters: Counters,
    /// The number of threads that have entered.
    entered: AtomicUsize,
    broken: AtomicBool,
    /// The end of a phase, or a panic.
    event: Event,
}

/// Signals the other threads if its thread panics, so that they do not wait forever.
struct Watch<'a>(&'a Region);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::SeqCst);
            self.0.event.notify();
        }
    }
}

/// A thread in a region.
pub struct Thread<'r, 'a> {
    region: &'r Region,
    index: usize,
    next: usize,
    prefetch: Option<&'a Prefetch<'a>>,
}

/// Runs `work` on all threads of the pool, or only on the calling one.
pub fn run<'a>(pool: &ThreadPool, threads: Threads, work: impl Fn(&mut Thread<'_, 'a>) + Sync) {
    let count = match threads {
        Threads::Own => 1,
        _ => pool.current_num_threads(),
    };
    let region = Region {
        counters: Counters::new(count),
        entered: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
        event: Event::new(),
    };
    let enter = || {
        let _watch = Watch(&region);
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
    /// Sets the memory to prefetch while the thread waits.
    pub fn prefetch(&mut self, prefetch: Option<&'a Prefetch<'a>>) {
        self.prefetch = prefetch;
    }

    /// Takes part in the next phase, of `count` units, and returns when all of them are done and their writes are
    /// visible. All threads must pass the same count.
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
                    if done.fetch_add(1, Ordering::SeqCst) + 1 == count {
                        self.region.event.notify();
                    }
                }
            }
        }
        self.wait(done, count);
    }

    /// A phase of one unit, which creates a value.
    pub fn once<'v, T>(&mut self, slot: &'v OnceLock<T>, make: impl FnOnce() -> T) -> &'v T {
        let mut make = Some(make);
        self.phase(1, |_| {
            slot.get_or_init(make.take().expect("a phase hands out a unit once"));
        });
        slot.get().expect("the phase has ended")
    }

    fn wait(&self, done: &AtomicUsize, count: usize) {
        let broken = || self.region.broken.load(Ordering::SeqCst);
        let done = || done.load(Ordering::SeqCst) >= count;
        let prefetch = || self.prefetch.is_some_and(|prefetch| prefetch.ask(self.index));
        self.region.event.wait(|| done() || broken(), prefetch);
        assert!(done(), "another thread panicked");
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
