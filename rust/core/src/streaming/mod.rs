//! Channel records that are loaded from a file on demand and dropped again.
//!
//! Each loaded record has its own memory. When a record is dropped, its memory is kept for the next one, because
//! otherwise the system takes pages back and fills them with zeros again, which took as long as the reads on drives
//! with cheap reads. Records that are close together in the file are loaded by one read into a buffer, and the
//! requested ones are copied from it. Records therefore need no alignment in the file, and memory holds no
//! unrequested data.
//!
//! The caller decides which records are loaded, and thereby the memory that they take.
//!
//! Invariants:
//! - A loaded record has the bytes that the file had when it was read.
//! - Memory never exceeds the maximum number of records that were loaded or in flight at a time, plus one buffer per
//!   reading thread.

mod file;
mod records;
mod slots;
#[cfg(test)]
mod tests;

pub use records::{Count, Failure, Place, Records};
pub use slots::Slots;

/// The maximum gap in bytes between two records of one read: a drive reads the gap in about the time of another read.
pub const GAP: usize = 48 << 10;
/// The maximum bytes of a read, or one record with the pages that it touches: drives reach their full rate at this
/// size.
pub const READ: usize = 512 << 10;
/// The alignment of offsets, lengths and memory of reads past the page cache.
const PAGE: usize = 4096;
