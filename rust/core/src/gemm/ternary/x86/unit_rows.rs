//! The rows of a unit, and reads of their codes.

use crate::formats::ternary::layout::{MAX_DICTIONARIES, SWAPPED, raw_bytes};
use crate::formats::ternary::{Code, Row};
use crate::gemm::ternary::unit::Unit;

/// A row of a unit: a compact [`crate::formats::ternary::PlacedRow`], because units have hundreds.
#[derive(Clone, Copy, Default)]
pub(super) struct UnitRow {
    /// The start of the row's bytes in the payload, and their number.
    pub start: usize,
    pub bytes: u32,
    /// The index of the row in the unit.
    pub number: u16,
    /// The index of the row's dictionary in the tensor, or [`OTHERS`].
    pub dictionary: u8,
    pub swapped: bool,
}

/// Marks rows without a dictionary: raw and empty rows, and all rows of dict16.
pub(super) const OTHERS: usize = MAX_DICTIONARIES;

/// The rows of a unit, sorted by dictionary, so that a dictionary's table stays in the first-level cache while its
/// rows are decoded; [`OTHERS`] are last.
pub(super) struct RowsByDictionary {
    pub rows: Vec<UnitRow>,
    pub ends: [usize; OTHERS + 1],
}

impl RowsByDictionary {
    pub fn new(unit: &Unit) -> RowsByDictionary {
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
    pub fn with_dictionary(&self, i: usize) -> &[UnitRow] {
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
    pub fn codes<'a>(&self, unit: &Unit<'a>) -> Row<'a> {
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
    pub fn levels(&self, unit: &Unit) -> (f32, f32) {
        unit.levels(unit.rows().start + usize::from(self.number))
    }
}

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
pub(super) unsafe fn pair(at: *const u8) -> u32 {
    // SAFETY: the caller guarantees two readable bytes; a packed structure needs no alignment, and any two bytes are a valid value.
    let Pair(pair) = unsafe { at.cast::<Pair>().read_volatile() };
    u32::from(u16::from_le(pair))
}
