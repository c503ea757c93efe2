//! Several phases of work in one parallel region: threads that are done with a phase wait for it at a spinning barrier.
//!
//! Waking a sleeping thread costs more than a phase of few activations, so a call wakes the pool once. A phase has ended
//! when all its units have, not when all threads have come: whoever is there does the work, and a thread that comes late
//! (or never, since it computes something else) holds up nobody.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rayon::ThreadPool;

/// Rounds of waiting before a thread lets others have its core: some 20 microseconds.
const SPINS: usize = 1 << 10;

/// A phase: units 0..count, handed out in their order.
struct Phase {
    count: usize,
    next: AtomicUsize,
    done: AtomicUsize,
}

/// What the threads of a region share.
pub struct Region {
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

impl Region {
    /// Runs `member` on all threads of the pool, or (`alone`) on this one. It goes through the phases, of `counts`
    /// units each, one after the other by [`Region::phase`].
    pub fn run(pool: &ThreadPool, counts: &[usize], alone: bool, member: impl Fn(&Region) + Sync) {
        let phase = |&count: &usize| Phase {
            count,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
        };
        let region = Region {
            phases: counts.iter().map(phase).collect(),
            broken: AtomicBool::new(false),
        };
        if alone || pool.current_num_threads() == 1 {
            return member(&region);
        }
        pool.broadcast(|_| {
            let _watch = Watch(&region.broken);
            member(&region);
        });
    }

    /// Takes part in a phase, and returns when all its units are done: what they wrote is visible then.
    pub fn phase(&self, number: usize, mut work: impl FnMut(usize)) {
        let phase = &self.phases[number];
        loop {
            let unit = phase.next.fetch_add(1, Ordering::Relaxed);
            if unit >= phase.count {
                break;
            }
            work(unit);
            phase.done.fetch_add(1, Ordering::Release);
        }
        let mut spins = 0;
        while phase.done.load(Ordering::Acquire) < phase.count {
            assert!(!self.broken.load(Ordering::Acquire), "another thread panicked");
            spins += 1;
            match spins < SPINS {
                true => std::hint::spin_loop(),
                false => std::thread::yield_now(),
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
            Region::run(&pool(threads), &counts, false, |region| {
                for number in 0..counts.len() {
                    region.phase(number, |unit| {
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
    fn a_panic_ends_the_region() {
        let pool = pool(3);
        let run = || {
            Region::run(&pool, &[8, 8], false, |region| {
                region.phase(0, |unit| assert_ne!(unit, 5));
                region.phase(1, |_| ());
            });
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
    }
}
