//! The thread pool of the core, which is independent of other pools of the process.
//!
//! Results never depend on the number of threads: work is divided at points determined by the data, and no sum
//! crosses them.
//!
//! A forked process has none of its parent's threads. Each process therefore has its own pool, found by the process
//! id, and never touches a lock of its parent, which another thread may have held at the fork.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

/// The maximum number of threads, above that of any supported machine.
const MAX_THREADS: usize = 1024;

/// The pool of a process.
struct Process {
    id: u32,
    /// The requested number of threads; 0 means one per core that the process may use.
    threads: AtomicUsize,
    pool: RwLock<Option<Arc<ThreadPool>>>,
    /// The process forked from this one, in that process's copy of the memory.
    child: OnceLock<Box<Process>>,
}

impl Process {
    fn new(threads: usize) -> Process {
        Process {
            id: std::process::id(),
            threads: AtomicUsize::new(threads),
            pool: RwLock::new(None),
            child: OnceLock::new(),
        }
    }

    /// The running process.
    fn current() -> &'static Process {
        static FIRST: OnceLock<Process> = OnceLock::new();
        let mut process = FIRST.get_or_init(|| Process::new(0));
        while process.id != std::process::id() {
            let fork = || Box::new(Process::new(process.threads.load(Ordering::Relaxed)));
            process = process.child.get_or_init(fork);
        }
        process
    }

    fn build(&self) -> Result<Arc<ThreadPool>> {
        let threads = match self.threads.load(Ordering::Relaxed) {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            threads => threads,
        };
        ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("moepack-{i}"))
            .build()
            .map(Arc::new)
            .map_err(|e| Error::InvalidArgument(format!("cannot start {threads} threads: {e}")))
    }
}

/// The pool in use. The first call starts it, with one thread per core unless [`set_threads`] was called.
pub fn current() -> Result<Arc<ThreadPool>> {
    let process = Process::current();
    if let Some(pool) = process.pool.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
        return Ok(pool.clone());
    }
    let mut guard = process.pool.write().unwrap_or_else(|e| e.into_inner());
    if let Some(pool) = guard.as_ref() {
        return Ok(pool.clone());
    }
    Ok(guard.insert(process.build()?).clone())
}

/// Replaces the pool by one of `threads` threads (1 to 1024). Running calls finish on the pool on which they started.
pub fn set_threads(threads: usize) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(Error::InvalidArgument(format!(
            "threads must be between 1 and {MAX_THREADS}, not {threads}"
        )));
    }
    let process = Process::current();
    let before = process.threads.swap(threads, Ordering::Relaxed);
    let pool = process
        .build()
        .inspect_err(|_| process.threads.store(before, Ordering::Relaxed))?;
    *process.pool.write().unwrap_or_else(|e| e.into_inner()) = Some(pool);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_has_the_requested_threads() {
        set_threads(3).unwrap();
        assert_eq!(current().unwrap().current_num_threads(), 3);
        assert!(set_threads(0).is_err());
        assert!(set_threads(MAX_THREADS + 1).is_err());
    }
}
