//! Several phases of work in one parallel region: threads that are done with a phase wait for it at a spinning barrier,
//! and may fetch memory meanwhile that is needed next ([`Ahead`]).
//!
//! Waking a sleeping thread costs more than a phase of few activations, so a call wakes threads once. A phase has ended
//! when all its units have, not when all threads have come: whoever is there does the work, and a thread that comes late
//! (or never, since it computes something else) holds up nobody.
//!
//! Each member has a run of a phase's units for its own, which it does in their order: units beside each other lie beside
//! each other in memory, and what is asked for ahead at the end of one is the start of the next. Units that their member
//! has not come to when another has none left are that one's.
//!
//! Every member goes through the same phases in the same order. How many units a phase has may depend on what earlier
//! phases found, for all members see it alike.

use std::ops::Range;
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

/// The part of `count` units that is the run of member `index` of `members`.
pub(super) fn share(count: usize, index: usize, members: usize) -> Range<usize> {
    count * index / members..count * (index + 1) / members
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
    members: usize,
    /// Members that have come.
    come: AtomicUsize,
    /// Of each phase the units that are done, and of each member's run those that have been handed out.
    counts: Vec<AtomicUsize>,
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
    index: usize,
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
    let members = match threads {
        Threads::Own => 1,
        _ => pool.current_num_threads(),
    };
    let region = Region {
        members,
        come: AtomicUsize::new(0),
        counts: (0..phases * (1 + members)).map(|_| AtomicUsize::new(0)).collect(),
        broken: AtomicBool::new(false),
    };
    let enter = || {
        let _watch = Watch(&region.broken);
        member(&mut Member {
            region: &region,
            index: region.come.fetch_add(1, Ordering::Relaxed) % members,
            next: 0,
            ahead: None,
        })
    };
    match members {
        1 => enter(),
        _ => crew::together(members - 1, threads == Threads::Awake, &enter),
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
        let members = self.region.members;
        let counts = &self.region.counts[self.next * (1 + members)..][..1 + members];
        let (done, taken) = (&counts[0], &counts[1..]);
        self.next += 1;
        for index in (self.index..members).chain(0..self.index) {
            let run = share(count, index, members);
            while taken[index].load(Ordering::Relaxed) < run.len() {
                let unit = taken[index].fetch_add(1, Ordering::Relaxed);
                if unit < run.len() {
                    work(run.start + unit);
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
            if !self.ahead.is_some_and(|ahead| ahead.fetch(self.index)) {
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
    fn runs_are_all_units_in_their_order() {
        for (count, members) in [(0, 2), (1, 2), (7, 3), (48, 5)] {
            let units = (0..members).flat_map(|index| share(count, index, members));
            assert!(units.eq(0..count));
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
