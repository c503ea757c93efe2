//! Prepared activations that several projections of a job share.
//!
//! A layout of activations is a type, and its cache a static of that type: so a key is compared with keys of its own type
//! only, and what is found has the right type without a cast. Entries are weak: they live as long as the products that
//! use them, and serve their own job alone.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::routing::Job;

/// What some jobs' activations have become in one layout: `K` tells what projections ask for apart.
#[derive(Debug)]
pub struct Cache<K, P>(Mutex<Vec<Entry<K, P>>>);

#[derive(Debug)]
struct Entry<K, P> {
    job: Weak<Job>,
    key: K,
    prepared: Weak<P>,
}

/// Prepared activations, and whose task it is to make them.
#[derive(Debug)]
pub struct Shared<P> {
    /// The activations.
    pub prepared: Arc<P>,
    /// Whether they are made by the units of another projection.
    pub borrowed: bool,
}

impl<P> Shared<P> {
    /// Activations that nobody else reads.
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

    /// The job's activations for a key: those of the first projection that asked, or what `make` gives.
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
