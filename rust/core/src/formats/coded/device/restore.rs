//! Restores the packed tensor from a GPU layout, for models that move to the CPU.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::super::layout::{Layout, STATE_BYTES};
use super::super::table::SLOTS;
use super::super::view::Coded;
use super::super::{LANES, corrupt};
use super::{Cut, HEADER_WORDS, MAGIC, UNIT, entries, stepped};
use crate::Result;

/// Restores the packed tensor, the inverse of [`CodedView::to_device`].
///
/// # Errors
/// [`Error::Corruption`](crate::Error) or `InsufficientData` if the bytes are not such a layout.
pub fn from_device(data: &[u8], pool: &ThreadPool) -> Result<Vec<u8>> {
    let stored = Stored::read(data)?;
    let mut out = vec![0; stored.packed.total_bytes()];
    out[..stored.head.len()].copy_from_slice(stored.head);
    let mut payload = &mut out[stored.head.len()..];
    let mut streams = Vec::with_capacity(stored.cut.streams());
    for pair in stored.packed.starts.windows(2) {
        let (stream, behind) = payload.split_at_mut(pair[1].at - pair[0].at);
        streams.push((pair[0].table, stream));
        payload = behind;
    }
    pool.install(|| {
        let streams = streams.into_par_iter().enumerate();
        streams.try_for_each(|(number, (table, out))| stored.stream(number, table, out))
    })?;
    Ok(out)
}

/// A parsed layout.
struct Stored<'a> {
    /// The tensor as its head describes it, without payload.
    packed: Coded,
    cut: Cut,
    head: &'a [u8],
    starts: &'a [u8],
    records: &'a [u8],
}

impl<'a> Stored<'a> {
    fn read(data: &'a [u8]) -> Result<Stored<'a>> {
        let Some((header, _)) = data.split_at_checked(8 * HEADER_WORDS) else {
            return corrupt("not a GPU layout");
        };
        let word = |i: usize| u64::from_le_bytes(header.as_chunks().0[i]);
        let section = |i: usize| {
            let (start, length) = (word(8 + 2 * i) as usize, word(9 + 2 * i) as usize);
            start.checked_add(length).and_then(|end| data.get(start..end))
        };
        let (Some(head), Some(starts), Some(records)) = (section(0), section(5), section(8)) else {
            return corrupt("sections of a GPU layout exceed its end");
        };
        let layout = Layout::read(head)?;
        let Some(total) = layout.total().filter(|&total| total < 2 * data.len() + (1 << 20)) else {
            return corrupt("a GPU layout is too short");
        };
        let mut packed = vec![0; total];
        match packed.get_mut(..head.len()) {
            Some(place) => place.copy_from_slice(head),
            None => return corrupt("the head of a GPU layout is too long"),
        }
        let packed = Coded::parse(&packed)?;
        let cut = Cut::new(layout, Some(word(5) as usize))?;
        let known = word(0) == u64::from_le_bytes(MAGIC)
            && head.len() == packed.sections.payload.start
            && starts.len() == 4 * (cut.all_blocks() * cut.chunks() + 1);
        match known {
            true => Ok(Stored {
                packed,
                cut,
                head,
                starts,
                records,
            }),
            false => corrupt("a GPU layout contradicts its head"),
        }
    }

    /// The record of a chunk, counted over all row blocks.
    fn record(&self, chunk: usize) -> Option<&[u8]> {
        let at = |i: usize| u32::from_le_bytes(self.starts.as_chunks().0[i]) as usize * UNIT;
        self.records.get(at(chunk)..at(chunk + 1))
    }

    /// Writes the states and bytes of a stream.
    fn stream(&self, number: usize, table: usize, out: &mut [u8]) -> Result<()> {
        let dependent = self.cut.layout.symbols.is_dependent();
        let entries = entries(&self.packed.tables[table], dependent);
        let (first, out) = out.split_at_mut(STATE_BYTES);
        let mut at = 0;
        for (i, block) in self.cut.blocks_of(number).enumerate() {
            let mut states = [0; LANES];
            for chunk in 0..self.cut.chunks() {
                let begins = chunk % self.cut.of_segment == 0;
                let before = if begins { self.cut.state_bytes() } else { 0 };
                let Some((stored, bytes)) = self
                    .record(block * self.cut.chunks() + chunk)
                    .and_then(|record| record.split_at_checked(before))
                else {
                    return corrupt("a record of a GPU layout is too short");
                };
                for (state, bytes) in states.iter_mut().zip(stored.as_chunks().0) {
                    *state = u32::from(u16::from_le_bytes(*bytes));
                }
                if i == 0 && chunk == 0 {
                    for (lane, state) in states.iter().enumerate() {
                        (first[lane], first[LANES + lane]) = ((state >> 8) as u8, *state as u8);
                    }
                }
                let states = &mut states[..self.cut.lanes_of(block)];
                let quads = self.cut.quads_of(chunk);
                if interleave(bytes, states, &entries, quads, out, &mut at).is_none() {
                    return corrupt("lanes of a GPU layout lack bytes");
                }
            }
        }
        Ok(())
    }
}

/// Decodes a chunk and writes the bytes of its lanes in reading order; `None` if bytes are missing.
fn interleave(
    record: &[u8],
    states: &mut [u32],
    entries: &[u32; SLOTS],
    quads: usize,
    out: &mut [u8],
    at: &mut usize,
) -> Option<()> {
    let (counts, bytes) = record.split_at_checked(LANES)?;
    let mut next = [0; LANES];
    for lane in 1..LANES {
        next[lane] = next[lane - 1] + usize::from(counts[lane - 1]);
    }
    for _ in 0..quads {
        for (state, next) in states.iter_mut().zip(&mut next) {
            *state = stepped(*state, entries[(*state & 255) as usize]);
            if *state < 256 {
                let byte = *bytes.get(*next)?;
                *state = *state << 8 | u32::from(byte);
                *next += 1;
                // Decoders of a damaged stream stay at its end.
                if let Some(place) = out.get_mut(*at) {
                    *place = byte;
                    *at += 1;
                }
            }
        }
    }
    Some(())
}
