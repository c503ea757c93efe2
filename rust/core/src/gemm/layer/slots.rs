//! Values that units of work create for later phases.

use std::sync::OnceLock;

/// Values that are each created by one unit of work and read by all threads in later phases.
#[derive(Debug)]
pub struct Slots<T>(Box<[OnceLock<T>]>);

impl<T> Slots<T> {
    /// `count` empty slots.
    pub fn new(count: usize) -> Slots<T> {
        Slots((0..count).map(|_| OnceLock::new()).collect())
    }

    /// The number of slots.
    #[allow(clippy::len_without_is_empty)] // No caller needs it.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Creates a value unless it exists.
    pub fn fill(&self, index: usize, make: impl FnOnce() -> T) {
        self.0[index].get_or_init(make);
    }

    /// Returns a value.
    ///
    /// # Panics
    /// If the value has not been created.
    #[inline]
    pub fn get(&self, index: usize) -> &T {
        self.0[index]
            .get()
            .expect("an earlier phase has created the value")
    }
}
