//! A tensor of channels with records that are loaded on demand.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::file::{open, read_at};
use super::slots::Slots;
use super::{GAP, PAGE, READ};
use crate::formats::channels::{Layout, View};
use crate::memory::Slot;
use crate::types::Shape;
use crate::{Error, Result};

/// The location of a tensor.
pub struct Place<'a> {
    /// The file.
    pub file: &'a Path,
    /// The offset of the tensor in the file.
    pub start: u64,
    /// Whether reads bypass the page cache; the file system must support it.
    pub direct: bool,
}

/// The reasons why records could not be read.
#[derive(Debug)]
pub enum Failure {
    /// An invalid argument.
    Argument(Error),
    /// The file ends at this byte.
    Ends(u64),
    /// An operating system error of a read at this byte.
    System(u64, io::Error),
}

/// The reads of a call.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// The number of reads.
    pub reads: usize,
    /// The bytes read.
    pub bytes: usize,
}

/// A tensor of channels with some records loaded.
pub struct Records {
    slots: Arc<Slots>,
    head: Vec<u8>,
    layout: Layout,
    file: File,
    start: u64,
    there: RwLock<Vec<Option<Slot>>>,
}

/// Records loaded by one read: a range of a list, ascending, and the bytes of the file that hold them.
struct Read {
    part: Range<usize>,
    bytes: Range<u64>,
}

impl Records {
    /// Opens a tensor with no records loaded.
    ///
    /// `head` holds the bytes before its first record; the same bytes of the file are not read.
    ///
    /// # Errors
    /// [`Failure::Argument`] if `head` is not the start of such a tensor, [`Failure::Ends`] if the file is shorter
    /// than the tensor, [`Failure::System`] if the file cannot be opened.
    pub fn open(slots: Arc<Slots>, head: &[u8], place: &Place) -> std::result::Result<Records, Failure> {
        let layout = Layout::of_head(head).map_err(Failure::Argument)?;
        let Shape { experts, rows, .. } = layout.shape();
        let system = |error| Failure::System(0, error);
        let file = open(place.file, place.direct).map_err(system)?;
        let length = file.metadata().map_err(system)?.len();
        // Checked before allocating the table of records, whose size comes from the header.
        if length.saturating_sub(place.start) < layout.total_bytes() as u64 {
            return Err(Failure::Ends(length));
        }
        Ok(Records {
            slots,
            head: head.to_vec(),
            layout,
            file,
            start: place.start + head.len() as u64,
            there: RwLock::new((0..experts * rows).map(|_| None).collect()),
        })
    }

    /// The shape, width and sizes.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The bytes of the buffer of each reading thread.
    pub fn buffer_bytes(&self) -> usize {
        READ.max(self.layout.record_bytes().next_multiple_of(PAGE) + PAGE)
    }

    /// Calls `work` with the tensor; no records are loaded or dropped meanwhile.
    pub fn view<T>(&self, work: impl FnOnce(View<'_>) -> Result<T>) -> Result<T> {
        let there = self.there.read().unwrap_or_else(PoisonError::into_inner);
        work(View::apart(&self.head, self.layout, &there))
    }

    /// Loads records, counted over all experts, with at most `threads` threads; `numbers` must ascend. Records that
    /// are already loaded are read again.
    ///
    /// # Errors
    /// [`Failure`]; no records have been loaded in this case.
    pub fn read(&self, numbers: &[usize], threads: usize) -> std::result::Result<Count, Failure> {
        self.check(numbers).map_err(Failure::Argument)?;
        let (reads, next) = (self.reads(numbers), AtomicUsize::new(0));
        let work = || self.follow(numbers, &reads, &next);
        let found: Vec<_> = match threads.min(reads.len()) {
            0 | 1 => vec![work()],
            threads => std::thread::scope(|scope| {
                let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
                let own = work();
                let others = others.into_iter().map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                });
                [own].into_iter().chain(others).collect()
            }),
        };
        let (mut came, mut failed) = (Vec::with_capacity(numbers.len()), None);
        for (slots, done) in found {
            came.extend(slots);
            failed = failed.or(done.err());
        }
        if let Some(failure) = failed {
            self.slots.give_back(came.into_iter().map(|(_, slot)| slot));
            return Err(failure);
        }
        let mut there = self.there.write().unwrap_or_else(PoisonError::into_inner);
        let before = came
            .into_iter()
            .filter_map(|(number, slot)| there[number].replace(slot));
        self.slots.give_back(before);
        Ok(Count {
            reads: reads.len(),
            bytes: reads.iter().map(|read| bytes(&read.bytes)).sum(),
        })
    }

    /// Drops records; `numbers` must ascend. Records that are not loaded are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a record does not exist.
    pub fn drop(&self, numbers: &[usize]) -> Result<()> {
        self.check(numbers)?;
        let mut there = self.there.write().unwrap_or_else(PoisonError::into_inner);
        self.slots
            .give_back(numbers.iter().filter_map(|&number| there[number].take()));
        Ok(())
    }

    fn check(&self, numbers: &[usize]) -> Result<()> {
        let Shape { experts, rows, .. } = self.layout.shape();
        let ascending = numbers.is_sorted_by(|one, next| one < next);
        if ascending && numbers.last().is_none_or(|&last| last < experts * rows) {
            return Ok(());
        }
        let message = format!("record numbers must ascend and be below {}", experts * rows);
        Err(Error::InvalidArgument(message))
    }

    /// The reads that load records, in whole pages of the file.
    fn reads(&self, numbers: &[usize]) -> Vec<Read> {
        let (page, length) = (PAGE as u64, self.layout.record_bytes() as u64);
        let mut reads: Vec<Read> = Vec::new();
        for (at, &number) in numbers.iter().enumerate() {
            let first = self.start + number as u64 * length;
            let last = (first + length).next_multiple_of(page);
            match reads.last_mut() {
                Some(read)
                    if first.saturating_sub(read.bytes.end) <= GAP as u64
                        && last - read.bytes.start <= READ as u64 =>
                {
                    (read.part.end, read.bytes.end) = (at + 1, last);
                }
                _ => reads.push(Read {
                    part: at..at + 1,
                    bytes: first / page * page..last,
                }),
            }
        }
        reads
    }

    /// Performs reads until none is left or one fails; returns the loaded records.
    fn follow(
        &self,
        numbers: &[usize],
        reads: &[Read],
        next: &AtomicUsize,
    ) -> (Vec<(usize, Slot)>, std::result::Result<(), Failure>) {
        let record = self.layout.record_bytes();
        let mut came = Vec::new();
        let done = self.slots.with_buffer(self.buffer_bytes(), |buffer| {
            while let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
                let part = &numbers[read.part.clone()];
                let place =
                    |number: usize| (self.start + (number * record) as u64 - read.bytes.start) as usize;
                let used = part.last().map_or(0, |&last| place(last) + record);
                let buffer = &mut buffer[..bytes(&read.bytes)];
                let filled = fill(&self.file, buffer, read.bytes.start, used);
                filled.inspect_err(|_| next.store(reads.len(), Ordering::Relaxed))?;
                for &number in part {
                    let mut slot = self.slots.take(record);
                    slot.bytes_mut()
                        .copy_from_slice(&buffer[place(number)..][..record]);
                    came.push((number, slot));
                }
            }
            Ok(())
        });
        (came, done)
    }
}

fn bytes(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

/// Reads a file's bytes at offset `place` until at least the first `used` are read: a file may end within a page.
fn fill(file: &File, into: &mut [u8], place: u64, used: usize) -> std::result::Result<(), Failure> {
    let mut there = 0;
    while there < used {
        let at = place + there as u64;
        match read_at(file, &mut into[there..], at) {
            Ok(0) => return Err(Failure::Ends(at)),
            Ok(count) => there += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::System(at, error)),
        }
    }
    Ok(())
}
