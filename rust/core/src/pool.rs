//! The thread pool of the core, its own so that it never changes anybody else's.
//!
//! Results never depend on the number of threads: work is cut at places that the data fixes, and no sum crosses a cut.

use std::sync::{Arc, OnceLock, RwLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{Error, Result};

/// More threads than any machine that this library is meant for.
const MAX_THREADS: usize = 1024;

fn slot() -> &'static RwLock<Option<Arc<ThreadPool>>> {
    static POOL: OnceLock<RwLock<Option<Arc<ThreadPool>>>> = OnceLock::new();
    POOL.get_or_init(|| RwLock::new(None))
}

fn build(threads: usize) -> Result<Arc<ThreadPool>> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("moepack-{i}"))
        .build()
        .map(Arc::new)
        .map_err(|e| Error::InvalidArgument(format!("cannot start {threads} threads: {e}")))
}

/// The pool in use; the first call starts it with one thread for each core that the process may use.
pub fn current() -> Result<Arc<ThreadPool>> {
    if let Some(pool) = slot().read().unwrap_or_else(|e| e.into_inner()).as_ref() {
        return Ok(pool.clone());
    }
    let mut guard = slot().write().unwrap_or_else(|e| e.into_inner());
    if let Some(pool) = guard.as_ref() {
        return Ok(pool.clone());
    }
    let pool = build(std::thread::available_parallelism().map_or(1, |n| n.get()))?;
    *guard = Some(pool.clone());
    Ok(pool)
}

/// Replaces the pool by one of `threads` threads (1 to 1024). Running calls finish on the pool that they started on.
pub fn set_threads(threads: usize) -> Result<()> {
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(Error::InvalidArgument(format!(
            "threads must be 1 to {MAX_THREADS}, not {threads}"
        )));
    }
    let pool = build(threads)?;
    *slot().write().unwrap_or_else(|e| e.into_inner()) = Some(pool);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_has_the_threads_asked_for() {
        set_threads(3).unwrap();
        assert_eq!(current().unwrap().current_num_threads(), 3);
        assert!(set_threads(0).is_err());
        assert!(set_threads(MAX_THREADS + 1).is_err());
    }
}
