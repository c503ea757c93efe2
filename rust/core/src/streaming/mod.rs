//! Records of channels that come from a file as products want them, and go again.
//!
//! A record that is there has memory of its own. When it goes, that memory is kept for the next one, so that the system
//! never takes pages back only to fill them with zeros again: on drives whose reads cost little that took as long as the
//! reads. Records that are near each other in the file come in one read, into a buffer, from which those that are wanted
//! are copied: so records need no alignment in the file, and memory holds nothing that nobody wanted.
//!
//! Which records are there is the caller's choice, and so is the memory that they take.
//!
//! Invariants:
//! - A record that is there has the bytes that the file had when it was read.
//! - Memory never exceeds the most records that were there, or on their way, at a time, and a buffer for each thread that
//!   reads.

mod records;
mod slots;
#[cfg(test)]
mod tests;

pub use records::{Count, Failure, Place, Records};
pub use slots::{Slot, Slots};

/// Most bytes between two records that are read along: a drive reads them in about the time of another read.
pub const GAP: usize = 48 << 10;
/// Most bytes of a read, or one record and the pages that it touches: drives reach their full rate at this.
pub const READ: usize = 512 << 10;
/// What places and lengths of reads past the page cache are multiples of, and memory that they fill.
const PAGE: usize = 4096;
