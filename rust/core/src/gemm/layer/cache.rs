//! Prepared activations that several projections of a job share.
//!
//! Each layout of activations is a type, and its cache is a static of that type. Keys are therefore compared only
//! with keys of the same type, and results need no cast. Entries are weak: they live as long as the products that use
//! them, and are only valid for their own job.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::routing::Job;

/// The prepared activations of jobs in one layout; the key `K` distinguishes what projections ask for.
#[derive(Debug)]
pub struct Cache<K, P>(Mutex<Vec<Entry<K, P>>>);

#[derive(Debug)]
struct Entry<K, P> {
    job: Weak<Job>,
    key: K,
    prepared: Weak<P>,
}

/// Prepared activations, and whether this projection has to make them.
#[derive(Debug)]
pub struct Shared<P> {
    /// The activations.
    pub prepared: Arc<P>,
    /// Whether the units of another projection make them.
    pub borrowed: bool,
}

impl<P> Shared<P> {
    /// Activations of a single reader.
    pub fn own(prepared: P) -> Shared<P> {
        let prepared = Arc::new(prepared);
        Shared {
            prepared,
            borrowed: false,
        }
    }
}

impl<K: PartialEq, P> Cache<K, P> {
    /// An empty cache.
    #[allow(clippy::new_without_default)] // Statics need a constant.
    pub const fn new() -> Cache<K, P> {
        Cache(Mutex::new(Vec::new()))
    }

    /// Returns the job's activations for a key: those of the first projection that asked, or the result of `make`.
    pub fn get(&self, job: &Arc<Job>, key: K, make: impl FnOnce(&K) -> P) -> Shared<P> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries
            .iter()
            .filter(|entry| std::ptr::eq(entry.job.as_ptr(), Arc::as_ptr(job)) && entry.key == key)
            .find_map(|entry| entry.prepared.upgrade());
        if let Some(prepared) = found {
            return Shared {
                prepared,
                borrowed: true,
            };
        }
        let shared = Shared::own(make(&key));
        entries.retain(|entry| entry.prepared.strong_count() > 0);
        entries.push(Entry {
            job: Arc::downgrade(job),
            key,
            prepared: Arc::downgrade(&shared.prepared),
        });
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_of_a_job_share_and_others_do_not() {
        let cache = Cache::<u32, Vec<u32>>::new();
        let jobs = [(); 2].map(|()| Arc::new(Job::of_offsets(&[0, 1])));
        let get = |job: usize, key| cache.get(&jobs[job], key, |&key| vec![key]);
        let first = get(0, 7);
        assert!(!first.borrowed && *first.prepared == [7]);
        let second = get(0, 7);
        assert!(second.borrowed && Arc::ptr_eq(&first.prepared, &second.prepared));
        assert!(!get(0, 8).borrowed && !get(1, 7).borrowed);
        drop((first, second));
        assert!(!get(0, 7).borrowed);
        assert!(cache.0.lock().unwrap().len() <= 2);
    }
}
