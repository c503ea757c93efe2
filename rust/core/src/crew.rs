//! The threads that compute beside a calling one: one crew for the process, whose members sleep unless they are called.
//!
//! Of a decoding step, waking threads of a pool and being woken by them again is 0.3 ms; so the calling thread takes part
//! here, and after work of a kind that soon comes again members look out for more before they sleep.
//!
//! A caller waits for members that are at its work, not for those that have not come: with its own part it closes the
//! door. While the crew works for somebody, other callers work alone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long members look out for more: what lies between the steps of a model that decodes.
const LOOKOUT: Duration = Duration::from_millis(2);
/// Rounds of looking out before a thread lets others have its core: some 20 microseconds.
const SPINS: usize = 1 << 10;

/// What a caller wants done; it outlives every member's use of it.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: what is behind the pointer is `Sync`, and shared by nothing but calls.
unsafe impl Send for Work {}

struct State {
    /// What there is to do, and how many members may come.
    work: Option<Work>,
    room: usize,
    /// Whether members look out when they are done.
    awake: bool,
    members: usize,
    asleep: usize,
    /// What a member died of.
    panic: Option<Box<dyn Any + Send>>,
}

struct Crew {
    taken: AtomicBool,
    state: Mutex<State>,
    called: Condvar,
    /// Calls so far, for members that look out.
    calls: AtomicUsize,
    /// Members at work: they enter and leave while they hold `state`.
    inside: AtomicUsize,
}

static CREW: Crew = Crew {
    taken: AtomicBool::new(false),
    state: Mutex::new(State {
        work: None,
        room: 0,
        awake: false,
        members: 0,
        asleep: 0,
        panic: None,
    }),
    called: Condvar::new(),
    calls: AtomicUsize::new(0),
    inside: AtomicUsize::new(0),
};

/// Does `work` on this thread and on up to `helpers` others at the same time. Afterwards those look out for more work if
/// `awake` is set. A panic of one of them is passed on.
pub(crate) fn together(helpers: usize, awake: bool, work: &(dyn Fn() + Sync)) {
    if CREW.taken.swap(true, Ordering::Acquire) {
        return work();
    }
    let call = Call;
    CREW.call(helpers, awake, work);
    work();
    drop(call);
}

/// The time in which the crew is somebody's; at its end no member uses the work any more.
struct Call;

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = CREW.state();
        state.work = None;
        drop(state);
        let mut spins = 0;
        while CREW.inside.load(Ordering::Acquire) > 0 {
            relax(&mut spins);
        }
        let panic = CREW.state().panic.take();
        CREW.taken.store(false, Ordering::Release);
        if let (Some(panic), false) = (panic, std::thread::panicking()) {
            resume_unwind(panic);
        }
    }
}

impl Crew {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn call(&'static self, helpers: usize, awake: bool, work: &(dyn Fn() + Sync)) {
        let mut state = self.state();
        while state.members < helpers && self.grow(state.members) {
            state.members += 1;
        }
        // SAFETY: only the lifetime changes. Members take the pointer under the lock while `work` is set, and count as
        // inside from then on until they have done with it; the caller's `Call` ends, however the caller does, after
        // `work` is none and nobody is inside.
        let work: Work = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work)
        });
        (state.work, state.room, state.awake) = (Some(work), helpers, awake);
        self.calls.fetch_add(1, Ordering::Release);
        let looking = state.members - state.asleep;
        for _ in looking..helpers {
            self.called.notify_one();
        }
    }

    /// Starts another member, which is asleep until it is called; not if the system has no thread left.
    fn grow(&'static self, number: usize) -> bool {
        let builder = std::thread::Builder::new().name(format!("moepack-crew-{number}"));
        builder.spawn(move || self.serve()).is_ok()
    }

    /// A member's life.
    fn serve(&self) {
        let (mut state, mut until) = (self.state(), Instant::now());
        loop {
            let Some(work) = state.work.filter(|_| state.room > 0) else {
                state = match Instant::now() < until {
                    true => self.look_out(state, until),
                    false => self.sleep(state),
                };
                continue;
            };
            let patience = if state.awake { LOOKOUT } else { Duration::ZERO };
            state.room -= 1;
            self.inside.fetch_add(1, Ordering::Relaxed);
            drop(state);
            // SAFETY: the work is there as long as this member is inside (see `call`).
            let end = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)() }));
            (state, until) = (self.state(), Instant::now() + patience);
            state.panic = state.panic.take().or(end.err());
            self.inside.fetch_sub(1, Ordering::Release);
        }
    }

    fn sleep<'s>(&self, mut state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        state.asleep += 1;
        let mut state = self.called.wait(state).unwrap_or_else(|e| e.into_inner());
        state.asleep -= 1;
        state
    }

    /// Waits for the next call without sleep, but not for ever.
    fn look_out<'s>(&'s self, state: MutexGuard<'s, State>, until: Instant) -> MutexGuard<'s, State> {
        let (seen, mut rounds) = (self.calls.load(Ordering::Relaxed), 0);
        drop(state);
        while self.calls.load(Ordering::Acquire) == seen && Instant::now() < until {
            relax(&mut rounds);
        }
        self.state()
    }
}

/// A round of waiting, which lets other threads have the core when there have been many.
pub(crate) fn relax(rounds: &mut usize) {
    *rounds += 1;
    match *rounds < SPINS {
        true => std::hint::spin_loop(),
        false => std::thread::yield_now(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests run side by side and the crew is one: a call that finds it taken is done alone.
    #[test]
    fn the_caller_works_and_so_may_helpers() {
        for helpers in [0, 1, 4] {
            let done = AtomicUsize::new(0);
            for _ in 0..200 {
                together(helpers, helpers == 1, &|| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            let done = done.into_inner();
            assert!((200..=200 * (1 + helpers)).contains(&done), "{done} of {helpers}");
        }
    }

    #[test]
    fn work_within_work_is_done_alone() {
        let done = AtomicUsize::new(0);
        together(1, false, &|| {
            together(1, false, &|| {
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert!((1..=4).contains(&done.into_inner()));
    }

    #[test]
    fn a_panic_is_passed_on_and_the_crew_goes_on() {
        for _ in 0..20 {
            let broken = || together(2, true, &|| panic!("of this test"));
            assert!(catch_unwind(broken).is_err());
            together(2, true, &|| ());
        }
    }
}
