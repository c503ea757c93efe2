//! The process's worker pool for parallel regions: threads that compute beside a calling one and sleep between calls.
//!
//! Waking the threads of another pool and being woken by them again takes 0.3 ms of a decoding step. The calling
//! thread therefore computes, too, and after a call that others follow soon, workers poll for the next call before
//! they sleep.
//!
//! A caller waits for workers that have started its work, but not for others: when its own part is done, no further
//! worker may start. While the pool works for one caller, other callers compute alone. Waiting threads leave their
//! cores to others when the machine is busy ([`crate::waiting`]).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::waiting::{Event, Polling};

/// The work of a caller; it outlives every worker's use of it.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn() + Sync));

// SAFETY: the pointee is `Sync`, and workers only call it through a shared reference.
unsafe impl Send for Work {}

struct State {
    /// The current work, and the number of workers that may still start it.
    work: Option<Work>,
    room: usize,
    /// Whether workers poll after their work.
    awake: bool,
    workers: usize,
    asleep: usize,
    /// The payload of a worker's panic.
    panic: Option<Box<dyn Any + Send>>,
}

struct WorkerPool {
    taken: AtomicBool,
    state: Mutex<State>,
    called: Condvar,
    /// The number of calls so far, for polling workers.
    calls: AtomicUsize,
    /// The number of running workers; they start and end while they hold `state`.
    running: AtomicUsize,
    /// The end of workers' running.
    finished: Event,
}

static POOL: WorkerPool = WorkerPool {
    taken: AtomicBool::new(false),
    state: Mutex::new(State {
        work: None,
        room: 0,
        awake: false,
        workers: 0,
        asleep: 0,
        panic: None,
    }),
    called: Condvar::new(),
    calls: AtomicUsize::new(0),
    running: AtomicUsize::new(0),
    finished: Event::new(),
};

/// Runs `work` on this thread and concurrently on up to `helpers` workers. Afterwards the workers poll for more work
/// if `awake` is set. Panics of workers are propagated.
pub(crate) fn run(helpers: usize, awake: bool, work: &(dyn Fn() + Sync)) {
    if POOL.taken.swap(true, Ordering::Acquire) {
        return work();
    }
    let call = Call;
    POOL.call(helpers, awake, work);
    work();
    drop(call);
}

/// A caller's claim on the pool; after its end no worker uses the work.
struct Call;

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = POOL.state();
        state.work = None;
        drop(state);
        let idle = || POOL.running.load(Ordering::SeqCst) == 0;
        POOL.finished.wait(idle, || false);
        let panic = POOL.state().panic.take();
        POOL.taken.store(false, Ordering::Release);
        if let (Some(panic), false) = (panic, std::thread::panicking()) {
            resume_unwind(panic);
        }
    }
}

impl WorkerPool {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn call(&'static self, helpers: usize, awake: bool, work: &(dyn Fn() + Sync)) {
        let mut state = self.state();
        while state.workers < helpers && self.grow(state.workers) {
            state.workers += 1;
        }
        // SAFETY: only the lifetime changes. Workers take the pointer under the lock while `work` is set, and count
        // as running from then until they have finished; the caller's `Call` ends, even if the caller panics, only
        // after `work` is `None` and no worker is running.
        let work: Work = Work(unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work)
        });
        (state.work, state.room, state.awake) = (Some(work), helpers, awake);
        self.calls.fetch_add(1, Ordering::Release);
        let polling = state.workers - state.asleep;
        for _ in polling..helpers {
            self.called.notify_one();
        }
    }

    /// Starts another worker, which sleeps until called; returns false if the system cannot create a thread.
    fn grow(&'static self, number: usize) -> bool {
        let builder = std::thread::Builder::new().name(format!("moepack-worker-{number}"));
        builder.spawn(move || self.serve()).is_ok()
    }

    /// A worker's loop.
    fn serve(&self) {
        let (mut state, mut awake) = (self.state(), false);
        loop {
            let Some(work) = state.work.filter(|_| state.room > 0) else {
                (state, awake) = match awake {
                    true => self.poll(state),
                    false => (self.sleep(state), false),
                };
                continue;
            };
            awake = state.awake;
            state.room -= 1;
            self.running.fetch_add(1, Ordering::SeqCst);
            drop(state);
            // SAFETY: the work exists as long as this worker is running (see `call`).
            let end = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)() }));
            state = self.state();
            state.panic = state.panic.take().or(end.err());
            self.running.fetch_sub(1, Ordering::SeqCst);
            self.finished.notify();
        }
    }

    fn sleep<'s>(&self, mut state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        state.asleep += 1;
        let mut state = self.called.wait(state).unwrap_or_else(|e| e.into_inner());
        state.asleep -= 1;
        state
    }

    /// Waits for the next call without sleeping; returns false if it took too long or the machine is busy.
    fn poll<'s>(&'s self, state: MutexGuard<'s, State>) -> (MutexGuard<'s, State>, bool) {
        let (seen, mut polling) = (self.calls.load(Ordering::Relaxed), Polling::new());
        drop(state);
        let called = loop {
            match self.calls.load(Ordering::Acquire) == seen {
                true if polling.goes_on() => (),
                waiting => break !waiting,
            }
        };
        (self.state(), called)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests run concurrently and share the pool: a call that finds it busy computes alone.
    #[test]
    fn the_caller_and_possibly_helpers_work() {
        for helpers in [0, 1, 4] {
            let done = AtomicUsize::new(0);
            for _ in 0..200 {
                run(helpers, helpers == 1, &|| {
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
        run(1, false, &|| {
            run(1, false, &|| {
                done.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert!((1..=4).contains(&done.into_inner()));
    }

    #[test]
    fn a_panic_is_propagated_and_the_pool_keeps_working() {
        for _ in 0..20 {
            let broken = || run(2, true, &|| panic!("of this test"));
            assert!(catch_unwind(broken).is_err());
            run(2, true, &|| ());
        }
    }
}
