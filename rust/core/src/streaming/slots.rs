//! Reused memory for records, and buffers for reads.

use std::sync::{Mutex, MutexGuard};

use super::PAGE;
use crate::memory::Slot;

/// The alignment of a record's bytes, as in a tensor.
const ALIGNMENT: usize = 64;

/// Memory shared by the tensors of a model.
#[derive(Default)]
pub struct Slots {
    spare: Mutex<Vec<Slot>>,
    buffers: Mutex<Vec<Slot>>,
}

impl Slots {
    /// Takes memory for a record of `length` bytes: that of a dropped record of the same size, if there is one.
    pub(super) fn take(&self, length: usize) -> Slot {
        let spare = lock(&self.spare).pop();
        spare
            .filter(|slot| slot.bytes().len() == length)
            .unwrap_or_else(|| Slot::new(length, ALIGNMENT))
    }

    /// Keeps the memory of dropped records.
    pub(super) fn give_back(&self, slots: impl IntoIterator<Item = Slot>) {
        lock(&self.spare).extend(slots);
    }

    /// Calls `work` with a buffer of at least `length` bytes, aligned for reads past the page cache.
    pub(super) fn with_buffer<T>(&self, length: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let spare = lock(&self.buffers).pop();
        let mut buffer = spare
            .filter(|buffer| buffer.bytes().len() >= length)
            .unwrap_or_else(|| Slot::new(length, PAGE));
        let done = work(buffer.bytes_mut());
        lock(&self.buffers).push(buffer);
        done
    }
}

/// Panics leave the list intact: slots are only pushed and popped.
fn lock(slots: &Mutex<Vec<Slot>>) -> MutexGuard<'_, Vec<Slot>> {
    slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
