//! Ternary kernels for x86-64 with AVX2 or AVX-512.
//!
//! One token: [`walk`]. Two to 32 tokens of a two-slot dictionary: [`blocks`]. Everything else, mainly more tokens:
//! rows are decoded to lists once, and [`sums`] multiplies them by each token block.

mod blocks;
mod sums;
mod vector;
mod walk;

use super::Kernel;
use super::lists::{List, position_bound};
use super::table::BlockTable;
use super::unit::Unit;
use crate::formats::ternary::layout::{MAX_DICTIONARIES, SWAPPED, raw_bytes};
use crate::formats::ternary::{Code, Row};
use crate::simd::{Isa, Kind};

/// Two neighbouring bytes as a number, at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Pair(u16);

/// Reads two bytes, the first in the low half.
///
/// The load is volatile: otherwise the compiler loads the pairs of a whole round as vectors and extracts them, which
/// makes the loops a third slower.
///
/// # Safety
/// The two bytes are readable.
#[inline(always)]
unsafe fn pair(at: *const u8) -> u32 {
    // SAFETY: the caller guarantees two readable bytes; a packed structure needs no alignment, and any two bytes are a valid value.
    let Pair(pair) = unsafe { at.cast::<Pair>().read_volatile() };
    u32::from(u16::from_le(pair))
}

/// A row of a unit: a compact [`crate::formats::ternary::PlacedRow`], because units have hundreds.
#[derive(Clone, Copy, Default)]
struct UnitRow {
    /// The start of the row's bytes in the payload, and their number.
    start: usize,
    bytes: u32,
    /// The index of the row in the unit.
    number: u16,
    /// The index of the row's dictionary in the tensor, or [`OTHERS`].
    dictionary: u8,
    swapped: bool,
}

/// Marks rows without a dictionary: raw and empty rows, and all rows of dict16.
const OTHERS: usize = MAX_DICTIONARIES;

/// The rows of a unit, sorted by dictionary, so that a dictionary's table stays in the first-level cache while its
/// rows are decoded; [`OTHERS`] are last.
struct RowsByDictionary {
    rows: Vec<UnitRow>,
    ends: [usize; OTHERS + 1],
}

impl RowsByDictionary {
    fn new(unit: &Unit) -> RowsByDictionary {
        let mut unsorted: Vec<UnitRow> = Vec::with_capacity(unit.rows().len());
        for group in unit.groups.clone() {
            match unit.view.code() {
                Code::Fsv8 => fsv8_rows(unit, group, &mut unsorted),
                Code::Dict16 => dict16_rows(unit, group, &mut unsorted),
            }
        }
        let mut ends = [0; OTHERS + 1];
        unsorted
            .iter()
            .for_each(|row| ends[usize::from(row.dictionary)] += 1);
        let mut before = 0;
        for end in &mut ends {
            (*end, before) = (before, before + *end);
        }
        let mut rows = vec![UnitRow::default(); unsorted.len()];
        for row in unsorted {
            let end = &mut ends[usize::from(row.dictionary)];
            rows[*end] = row;
            *end += 1;
        }
        RowsByDictionary { rows, ends }
    }

    /// The rows with dictionary `i`.
    fn with_dictionary(&self, i: usize) -> &[UnitRow] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.rows[start..self.ends[i]]
    }
}

fn fsv8_rows(unit: &Unit, group: usize, rows: &mut Vec<UnitRow>) {
    let raw_bytes = raw_bytes(unit.view.columns());
    let (mut start, tails) = unit.view.fsv8_tails(unit.expert, group);
    for (bytes, field) in tails {
        let coded = bytes != 0 && bytes != raw_bytes;
        let dictionary = if coded { field & !SWAPPED } else { OTHERS as u32 };
        rows.push(UnitRow {
            start,
            bytes: bytes as u32,
            number: rows.len() as u16,
            dictionary: dictionary as u8,
            swapped: field & SWAPPED != 0,
        });
        start += bytes;
    }
}

fn dict16_rows(unit: &Unit, group: usize, rows: &mut Vec<UnitRow>) {
    for placed in unit.view.group_rows(unit.expert, group) {
        rows.push(UnitRow {
            start: placed.start,
            bytes: placed.codes.bytes().len() as u32,
            number: rows.len() as u16,
            dictionary: OTHERS as u8,
            swapped: false,
        });
    }
}

impl UnitRow {
    /// The codes of the row.
    fn codes<'a>(&self, unit: &Unit<'a>) -> Row<'a> {
        let bytes = &unit.view.padded_payload()[self.start..][..self.bytes as usize];
        match (unit.view.code(), usize::from(self.dictionary)) {
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
        unit.levels(unit.rows().start + usize::from(self.number))
    }
}

/// Computes a unit into `out` (rows x tokens) with a kernel of AVX2 or AVX-512.
pub(super) fn rows(unit: &Unit, kernel: Kernel, out: &mut [f32]) {
    let wide = match kernel.isa.kind() {
        Kind::Avx2 => false,
        Kind::Avx512 => true,
        _ => unreachable!("{} is no kernel of this module", kernel.name()),
    };
    if unit.tile.is_steps() {
        // SAFETY: the kernel's set is AVX2 or AVX-512, as matched; both include AVX2, FMA, BMI1 and BMI2.
        return unsafe { walk::rows(unit, kernel.ahead, out) };
    }
    let sorted = RowsByDictionary::new(unit);
    let tokens = unit.tile.tokens();
    let mut listed = Vec::new();
    for row in &sorted.rows {
        let out = &mut out[usize::from(row.number) * tokens..][..tokens];
        match block_table(unit, row) {
            // SAFETY: the kernel's set is AVX-512, which includes AVX2, FMA, BMI1 and BMI2.
            Some(table) if wide => unsafe { blocks::row_avx512(unit, row, table, out) },
            // SAFETY: the kernel's set is AVX2, which comes with FMA, BMI1 and BMI2.
            Some(table) => unsafe { blocks::row_avx2(unit, row, table, out) },
            None => listed.push(*row),
        }
    }
    let mut lists: Vec<List> = std::iter::repeat_with(List::default)
        .take(LISTED_ROWS.min(listed.len()))
        .collect();
    for rows in listed.chunks(LISTED_ROWS) {
        for (row, list) in rows.iter().zip(&mut lists) {
            list.fill(unit.view, row.codes(unit));
        }
        add_lists(unit, rows, &lists, kernel.isa, out);
    }
}

/// The number of rows decoded before their lists are multiplied by the token blocks: a block's values are then loaded
/// into the second-level cache once for all of them, and the lists fit the cache, too.
const LISTED_ROWS: usize = 64;

/// Writes the outputs of rows from their lists, with AVX2 or AVX-512.
fn add_lists(unit: &Unit, rows: &[UnitRow], lists: &[List], isa: Isa, out: &mut [f32]) {
    let (tokens, bound) = (unit.tile.tokens(), position_bound(unit.view));
    for block in unit.tile.blocks() {
        let values = unit.tile.values(block);
        // `sums` relies on the items being below twice the bound, which the values must cover.
        assert!(bound * block.lanes <= values.len());
        for (row, list) in rows.iter().zip(lists) {
            let levels = list.levels(row.levels(unit));
            let out = &mut out[usize::from(row.number) * tokens + block.token..][..block.tokens];
            match isa.kind() {
                // SAFETY: `isa` proves that the processor has AVX2 and FMA. Items are below twice the bound, so their
                // positions are below it, and `values` holds `lanes` floats for each of these, as asserted.
                Kind::Avx2 => unsafe { sums::block_avx2(list.items(), values, block.lanes, levels, out) },
                // SAFETY: `isa` proves that the processor has AVX-512 F, AVX2 and FMA; the bounds are those of AVX2.
                Kind::Avx512 => unsafe { sums::block_avx512(list.items(), values, block.lanes, levels, out) },
                _ => unreachable!("{} is no set of this module", isa.name()),
            }
        }
    }
}

/// The table for multiplying a row without a list, if there is one block of tokens and the dictionary has two slots.
fn block_table(unit: &Unit, row: &UnitRow) -> Option<&'static BlockTable> {
    match (usize::from(row.dictionary), unit.tile.blocks()) {
        (OTHERS, _) => None,
        (dictionary, [block]) => {
            BlockTable::fsv8(usize::from(unit.view.dictionaries()[dictionary]), block.lanes)
        }
        _ => None,
    }
}
