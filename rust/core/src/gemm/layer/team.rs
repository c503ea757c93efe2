//! Several phases of work in one parallel region: threads that are done with a phase wait for it at a spinning barrier,
//! and may fetch memory meanwhile that is needed next ([`Ahead`]).
//!
//! Waking a sleeping thread costs more than a phase of few activations, so a call wakes threads once. A phase has ended
//! when all its units have, not when all threads have come: whoever is there does the work, and a thread that comes late
//! (or never, since it computes something else) holds up nobody.
//!
//! Every member goes through the same phases in the same order. How many units a phase has may depend on what earlier
//! phases found, for all members see it alike.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::ThreadPool;

use super::ahead::Ahead;
use crate::crew;

/// Who goes through a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    Own,
    /// As many as the pool has: the calling thread, and members of the crew.
    All,
    /// The same, for a region that others follow soon.
    Awake,
}

/// A phase, whose units are handed out in their order.
#[derive(Default)]
struct Phase {
    next: AtomicUsize,
    done: AtomicUsize,
}

impl Threads {
    /// Who computes for so many tokens, by what it is worth: after one token others follow.
    pub fn of(alone: bool, tokens: usize) -> Threads {
        match (alone, tokens) {
            (true, _) => Threads::Own,
            (false, 1) => Threads::Awake,
            (false, _) => Threads::All,
        }
    }
}

/// What the threads of a region share.
struct Region {
    phases: Vec<Phase>,
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

/// A thread's way through the phases of a region.
pub struct Member<'r, 'a> {
    region: &'r Region,
    next: usize,
    ahead: Option<&'a Ahead<'a>>,
}

/// Runs `member` on threads, as many as the pool has. It goes through at most `phases` phases.
pub fn run<'a>(
    pool: &ThreadPool,
    phases: usize,
    threads: Threads,
    member: impl Fn(&mut Member<'_, 'a>) + Sync,
) {
    let region = Region {
        phases: (0..phases).map(|_| Phase::default()).collect(),
        broken: AtomicBool::new(false),
    };
    let enter = || {
        let _watch = Watch(&region.broken);
        member(&mut Member {
            region: &region,
            next: 0,
            ahead: None,
        })
    };
    match (pool.current_num_threads(), threads) {
        (1, _) | (_, Threads::Own) => enter(),
        (count, _) => crew::together(count - 1, threads == Threads::Awake, &enter),
    }
}

impl<'a> Member<'_, 'a> {
    /// Says what to fetch into the caches from now on while there is nothing else to do.
    pub fn expect(&mut self, ahead: Option<&'a Ahead<'a>>) {
        self.ahead = ahead;
    }

    /// Takes part in the next phase, of `count` units, and returns when all of them are done: what they wrote is visible
    /// then. All members give the same count.
    pub fn phase(&mut self, count: usize, mut work: impl FnMut(usize)) {
        let phase = &self.region.phases[self.next];
        self.next += 1;
        while phase.done.load(Ordering::Acquire) < count {
            let unit = phase.next.fetch_add(1, Ordering::Relaxed);
            if unit >= count {
                return self.wait(phase, count);
            }
            work(unit);
            phase.done.fetch_add(1, Ordering::Release);
        }
    }

    /// A phase of one unit, which makes a value.
    pub fn once<'v, T>(&mut self, slot: &'v OnceLock<T>, make: impl FnOnce() -> T) -> &'v T {
        let mut make = Some(make);
        self.phase(1, |_| {
            slot.get_or_init(make.take().expect("a phase hands out a unit once"));
        });
        slot.get().expect("the phase has ended")
    }

    fn wait(&self, phase: &Phase, count: usize) {
        let mut rounds = 0;
        while phase.done.load(Ordering::Acquire) < count {
            let broken = self.region.broken.load(Ordering::Acquire);
            assert!(!broken, "another thread panicked");
            if !self.ahead.is_some_and(Ahead::fetch) {
                crew::relax(&mut rounds);
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
            run(&pool(threads), counts.len(), Threads::All, |member| {
                for number in 0..counts.len() {
                    member.phase(counts[number], |unit| {
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
            run(&pool(threads), 2, Threads::Awake, |member| {
                let &count = member.once(&slot, || made.fetch_add(1, Ordering::Relaxed) + 7);
                member.phase(count, |_| {
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
            run(&pool, 2, Threads::Awake, |member| {
                member.phase(8, |unit| assert_ne!(unit, 5));
                member.phase(8, |_| ());
            });
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
    }
}
