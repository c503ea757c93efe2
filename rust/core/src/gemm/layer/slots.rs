//! Values that units of work make for later phases.

use std::sync::OnceLock;

/// Values that are made one by one, each by one unit of work, and read by all threads in later phases.
#[derive(Debug)]
pub struct Slots<T>(Box<[OnceLock<T>]>);

impl<T> Slots<T> {
    /// So many values to be made.
    pub fn new(count: usize) -> Slots<T> {
        Slots((0..count).map(|_| OnceLock::new()).collect())
    }

    /// How many values there are to be made.
    #[allow(clippy::len_without_is_empty)] // No caller asks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Makes a value, unless it is there.
    pub fn fill(&self, index: usize, make: impl FnOnce() -> T) {
        self.0[index].get_or_init(make);
    }

    /// A value.
    ///
    /// # Panics
    /// If it has not been made.
    #[inline]
    pub fn get(&self, index: usize) -> &T {
        self.0[index].get().expect("an earlier phase has made it")
    }
}
