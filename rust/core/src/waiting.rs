//! Waits for other threads, without a system call while the machine has idle cores, and asleep while it has none.
//!
//! Waits within a parallel region are short if every thread has a core, and waking a sleeping thread takes longer than
//! they do. With more runnable threads than cores, however, the awaited thread may not be running. A waiting thread
//! that polls or yields then uses up processor time that it lacks when it has work again. A thread that sleeps keeps
//! its claim, and the scheduler runs it soon after it is woken.
//!
//! A thread notices others by the clock: two consecutive rounds of polling are nanoseconds apart, unless its core ran
//! another thread in between. From then on, threads of this process sleep after a few rounds, and look again later.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The rounds of polling before the first look at the clock: about a microsecond.
const FEW: u32 = 1 << 6;
/// The rounds of polling before a thread yields its core: some 20 microseconds.
const SPINS: u32 = 1 << 10;
/// The time after which a waiting thread sleeps: more than the time between the steps of a decoding model.
const PATIENCE: Duration = Duration::from_millis(2);
/// The time between two rounds that shows that another thread has run: less than a time slice, and more than an
/// interrupt takes.
const GAP: Duration = Duration::from_micros(300);
/// The time for which a machine counts as crowded.
const MEMORY: Duration = Duration::from_millis(100);

/// Whether other threads have used this process's cores lately.
struct Crowd {
    /// The end of the time for which the machine counts as crowded, in nanoseconds after [`start`].
    until: AtomicU64,
}

static CROWD: Crowd = Crowd::new();

/// The time from which moments are counted.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

impl Crowd {
    const fn new() -> Crowd {
        Crowd {
            until: AtomicU64::new(0),
        }
    }

    fn nanoseconds(moment: Instant) -> u64 {
        moment.saturating_duration_since(start()).as_nanos() as u64
    }

    fn is_crowded(&self, now: Instant) -> bool {
        Self::nanoseconds(now) < self.until.load(Ordering::Relaxed)
    }

    /// Takes account of two consecutive rounds; returns whether they were apart.
    fn observe(&self, before: Instant, now: Instant) -> bool {
        let apart = now.saturating_duration_since(before) > GAP;
        if apart {
            self.until
                .fetch_max(Self::nanoseconds(now + MEMORY), Ordering::Relaxed);
        }
        apart
    }
}

/// The polling of a waiting thread.
pub(crate) struct Polling {
    rounds: u32,
    /// The first and the last look at the clock.
    seen: Option<(Instant, Instant)>,
}

impl Polling {
    pub fn new() -> Polling {
        Polling {
            rounds: 0,
            seen: None,
        }
    }

    /// A round of polling. Returns false if the thread should sleep.
    pub fn goes_on(&mut self) -> bool {
        self.rounds = self.rounds.saturating_add(1);
        let looks = self.rounds == FEW || self.rounds >= SPINS;
        if looks && !self.looks_well(&CROWD, Instant::now()) {
            return false;
        }
        match self.rounds < SPINS {
            true => std::hint::spin_loop(),
            false => std::thread::yield_now(),
        }
        true
    }

    /// Looks at the clock; returns whether the machine has idle cores and the wait is not long.
    fn looks_well(&mut self, crowd: &Crowd, now: Instant) -> bool {
        let (first, last) = self.seen.unwrap_or((now, now));
        self.seen = Some((first, now));
        let apart = crowd.observe(last, now);
        !apart && !crowd.is_crowded(now) && now.saturating_duration_since(first) < PATIENCE
    }
}

/// Changes of atomics for which threads wait.
///
/// A thread that changes an atomic calls [`notify`](Self::notify) afterwards; `ready` of [`wait`](Self::wait) reads the atomic.
/// All of these accesses are sequentially consistent. Either the change precedes a sleeper's last look, or the
/// sleeper's entry in `sleepers` precedes the notifier's look; therefore no thread sleeps after the last change.
#[derive(Default)]
pub(crate) struct Event {
    sleepers: AtomicUsize,
    /// Held by sleepers from their entry in `sleepers` until they wait for `changed`.
    entrance: Mutex<()>,
    changed: Condvar,
}

impl Event {
    pub const fn new() -> Event {
        Event {
            sleepers: AtomicUsize::new(0),
            entrance: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Waits until `ready`. Meanwhile calls `useful`, which returns false if it has nothing to do.
    pub fn wait(&self, ready: impl Fn() -> bool, mut useful: impl FnMut() -> bool) {
        let mut polling = Polling::new();
        while !ready() {
            if !useful() && !polling.goes_on() {
                return self.sleep(ready);
            }
        }
    }

    fn sleep(&self, ready: impl Fn() -> bool) {
        let mut guard = self.entrance.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes all sleepers, which look again.
    pub fn notify(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.entrance.lock());
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_gap_between_rounds_makes_the_machine_crowded_for_a_while() {
        let (crowd, first) = (Crowd::new(), start() + Duration::from_secs(1));
        assert!(!crowd.is_crowded(first));
        let next = first + GAP / 2;
        assert!(!crowd.observe(first, next) && !crowd.is_crowded(next));
        let late = next + 2 * GAP;
        assert!(crowd.observe(next, late) && crowd.is_crowded(late));
        assert!(crowd.is_crowded(late + MEMORY / 2) && !crowd.is_crowded(late + MEMORY));
    }

    #[test]
    fn a_thread_polls_until_a_gap_a_crowd_or_the_end_of_its_patience() {
        let (crowd, first) = (Crowd::new(), start() + Duration::from_secs(1));
        let rounds = |step: Duration| {
            let (mut polling, mut now) = (Polling::new(), first);
            let mut rounds = 0;
            while polling.looks_well(&crowd, now) {
                (rounds, now) = (rounds + 1, now + step);
            }
            rounds
        };
        assert_eq!(rounds(PATIENCE / 10), 10);
        assert_eq!(rounds(GAP * 2), 1);
        assert_eq!(rounds(PATIENCE / 10), 0);
    }

    /// Waits until a thread sleeps.
    fn until_asleep(event: &Event, sleepers: usize) {
        while event.sleepers.load(Ordering::SeqCst) < sleepers {
            std::thread::yield_now();
        }
    }

    #[test]
    fn sleepers_wake_for_their_own_change_only() {
        let (event, [first, second]) = (Event::new(), [false, false].map(AtomicBool::new));
        let set = |flag: &AtomicBool| {
            flag.store(true, Ordering::SeqCst);
            event.notify();
        };
        std::thread::scope(|scope| {
            let waiting =
                [&first, &second].map(|flag| scope.spawn(|| event.sleep(|| flag.load(Ordering::SeqCst))));
            until_asleep(&event, 2);
            set(&first);
            let [one, other] = waiting;
            one.join().unwrap();
            assert!(!other.is_finished());
            set(&second);
        });
        assert_eq!(event.sleepers.into_inner(), 0);
    }

    #[test]
    fn no_change_is_missed() {
        const ROUNDS: usize = 20_000;
        let (event, turn) = (Event::new(), AtomicUsize::new(0));
        let play = |parity: usize| {
            for round in (parity..ROUNDS).step_by(2) {
                // Without polling, every round is a race of a sleeper and a notifier.
                event.sleep(|| turn.load(Ordering::SeqCst) == round);
                turn.store(round + 1, Ordering::SeqCst);
                event.notify();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(0));
            play(1);
        });
        assert_eq!(turn.into_inner(), ROUNDS);
    }

    #[test]
    fn useful_work_replaces_polling() {
        let (event, left) = (Event::new(), AtomicUsize::new(100));
        event.wait(
            || left.load(Ordering::SeqCst) == 0,
            || left.fetch_sub(1, Ordering::SeqCst) > 0,
        );
        assert_eq!(left.into_inner(), 0);
    }
}
