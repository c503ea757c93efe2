//! Kernels for x86-64 with AVX2 or AVX-512.
//!
//! One token: [`walk`]. Two to 32 tokens of a two-slot dictionary: [`blocks`]. Everything else, more tokens above all:
//! rows become lists once, and [`sums`] runs them over each block of tokens.

mod blocks;
mod sums;
mod vector;
mod walk;

use super::lists::{List, reach};
use super::table::BlockTable;
use super::unit::Unit;
use crate::formats::ternary::layout::{MAX_DICTIONARIES, SWAPPED, raw_bytes};
use crate::formats::ternary::{Code, Row};
use crate::simd::Isa;

/// Two neighbouring bytes as a number, at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Pair(u16);

/// Reads two bytes, the first in the low half.
///
/// The load is volatile: otherwise the compiler fetches the pairs of a whole round as vectors and takes them apart
/// again, which makes the loops a third slower.
///
/// # Safety
/// The two bytes can be read.
#[inline(always)]
unsafe fn pair(at: *const u8) -> u32 {
    // SAFETY: the caller's promise; a packed structure needs no alignment, and any two bytes are one.
    let Pair(pair) = unsafe { at.cast::<Pair>().read_volatile() };
    u32::from(u16::from_le(pair))
}

/// Which instructions a kernel may use, and in which order its loads are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// AVX2, look-ups a few codes ahead of their use or not.
    Avx2 { ahead: bool },
    /// AVX-512, likewise.
    Avx512 { ahead: bool },
}

/// A row of a unit: [`crate::formats::ternary::PlacedRow`] in less space, for units have hundreds.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Where its bytes begin in the payload, and how many there are.
    start: usize,
    bytes: u32,
    /// Counted in the unit.
    row: u16,
    part: u8,
    swapped: bool,
}

/// The part of rows without a dictionary.
const OTHERS: usize = MAX_DICTIONARIES;

/// The rows of a unit in parts, one for each dictionary, so that a dictionary's table stays in the first-level cache
/// while its rows are decoded; the last part holds the others: raw and empty rows, and all rows of dict16.
struct Parts {
    places: Vec<Place>,
    ends: [usize; OTHERS + 1],
}

impl Parts {
    fn new(unit: &Unit) -> Parts {
        let mut unsorted: Vec<Place> = Vec::with_capacity(unit.rows().len());
        for group in unit.groups.clone() {
            match unit.view.code() {
                Code::Fsv8 => fsv8_places(unit, group, &mut unsorted),
                Code::Dict16 => dict16_places(unit, group, &mut unsorted),
            }
        }
        let mut ends = [0; OTHERS + 1];
        unsorted
            .iter()
            .for_each(|place| ends[usize::from(place.part)] += 1);
        let mut before = 0;
        for end in &mut ends {
            (*end, before) = (before, before + *end);
        }
        let mut places = vec![Place::default(); unsorted.len()];
        for place in unsorted {
            let end = &mut ends[usize::from(place.part)];
            places[*end] = place;
            *end += 1;
        }
        Parts { places, ends }
    }

    /// The rows of the `i`-th part.
    fn part(&self, i: usize) -> &[Place] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.places[start..self.ends[i]]
    }
}

fn fsv8_places(unit: &Unit, group: usize, places: &mut Vec<Place>) {
    let raw_bytes = raw_bytes(unit.view.columns());
    let (mut start, tails) = unit.view.fsv8_tails(unit.expert, group);
    for (bytes, field) in tails {
        let coded = bytes != 0 && bytes != raw_bytes;
        let part = if coded { field & !SWAPPED } else { OTHERS as u32 };
        places.push(Place {
            start,
            bytes: bytes as u32,
            row: places.len() as u16,
            part: part as u8,
            swapped: field & SWAPPED != 0,
        });
        start += bytes;
    }
}

fn dict16_places(unit: &Unit, group: usize, places: &mut Vec<Place>) {
    for placed in unit.view.group_rows(unit.expert, group) {
        places.push(Place {
            start: placed.start,
            bytes: placed.codes.bytes().len() as u32,
            row: places.len() as u16,
            part: OTHERS as u8,
            swapped: false,
        });
    }
}

impl Place {
    /// The codes of the row.
    fn codes<'a>(&self, unit: &Unit<'a>) -> Row<'a> {
        let bytes = &unit.view.padded_payload()[self.start..][..self.bytes as usize];
        match (unit.view.code(), usize::from(self.part)) {
            (Code::Dict16, _) => Row::Dict16(bytes),
            (Code::Fsv8, OTHERS) if bytes.is_empty() => Row::Zero,
            (Code::Fsv8, OTHERS) => Row::Raw(bytes),
            (Code::Fsv8, dictionary) => Row::Fsv8 {
                codes: bytes,
                dictionary,
                swapped: self.swapped,
            },
        }
    }

    /// The levels (negative, positive) of the row.
    #[inline(always)]
    fn levels(&self, unit: &Unit) -> (f32, f32) {
        unit.levels(unit.rows().start + usize::from(self.row))
    }
}

/// Computes a unit into `out` (rows x tokens).
///
/// # Panics
/// If the processor lacks the instructions of `variant`.
pub(super) fn rows(unit: &Unit, variant: Variant, out: &mut [f32]) {
    let (isa, wide, ahead) = match variant {
        Variant::Avx2 { ahead } => (Isa::Avx2, false, ahead),
        Variant::Avx512 { ahead } => (Isa::Avx512, true, ahead),
    };
    assert!(isa.available());
    if unit.tile.is_steps() {
        // SAFETY: both instruction sets include AVX2, FMA, BMI1 and BMI2, and the set is available.
        return unsafe { walk::rows(unit, ahead, out) };
    }
    let parts = Parts::new(unit);
    let tokens = unit.tile.tokens();
    let mut listed = Vec::new();
    for place in &parts.places {
        let out = &mut out[usize::from(place.row) * tokens..][..tokens];
        match block_table(unit, place) {
            // SAFETY: the instruction set is available.
            Some(table) if wide => unsafe { blocks::row_avx512(unit, place, table, out) },
            // SAFETY: as above.
            Some(table) => unsafe { blocks::row_avx2(unit, place, table, out) },
            None => listed.push(*place),
        }
    }
    let mut lists: Vec<List> = std::iter::repeat_with(List::default)
        .take(LISTED_ROWS.min(listed.len()))
        .collect();
    for places in listed.chunks(LISTED_ROWS) {
        for (place, list) in places.iter().zip(&mut lists) {
            list.fill(unit.view, place.codes(unit));
        }
        add_lists(unit, places, &lists, wide, out);
    }
}

/// Rows decoded before their lists are run over the blocks of tokens, so that a block's values are fetched once for
/// all of them, and few enough for the lists to stay in the second-level cache beside it.
const LISTED_ROWS: usize = 64;

/// The outputs of rows from their lists.
fn add_lists(unit: &Unit, places: &[Place], lists: &[List], wide: bool, out: &mut [f32]) {
    let (tokens, reach) = (unit.tile.tokens(), reach(unit.view));
    for block in unit.tile.blocks() {
        let values = unit.tile.values(block);
        // `sums` trusts the items: they are below twice the reach, which the values must cover.
        assert!(reach * block.lanes <= values.len());
        for (place, list) in places.iter().zip(lists) {
            let levels = list.levels(place.levels(unit));
            let out = &mut out[usize::from(place.row) * tokens + block.token..][..block.tokens];
            match wide {
                // SAFETY: as asserted; `rows` has checked that the instruction set is available.
                true => unsafe { sums::block_avx512(list.items(), values, block.lanes, levels, out) },
                // SAFETY: as above.
                false => unsafe { sums::block_avx2(list.items(), values, block.lanes, levels, out) },
            }
        }
    }
}

/// The table to decode a row on the fly with, if that is the way to go: one block of tokens, a two-slot dictionary.
fn block_table(unit: &Unit, place: &Place) -> Option<&'static BlockTable> {
    match (usize::from(place.part), unit.tile.blocks()) {
        (OTHERS, _) => None,
        (dictionary, [block]) => {
            BlockTable::fsv8(usize::from(unit.view.dictionaries()[dictionary]), block.lanes)
        }
        _ => None,
    }
}
