//! Kernels for x86-64 with AVX2 or AVX-512.
//!
//! One token: [`walk`]. Two to 32 tokens of a two-slot dictionary: [`blocks`]. Everything else, more tokens above all:
//! rows become lists once, and [`sums`] runs them over each block of tokens.

mod blocks;
mod sums;
mod vector;
mod walk;

use super::drive::Unit;
use super::lists::{List, reach};
use super::table::BlockTable;
use crate::simd::Isa;
use crate::ternary::layout::MAX_DICTIONARIES;
use crate::ternary::{PlacedRow, Row};

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

/// The rows of a unit in parts, one for each dictionary, so that a dictionary's table stays in the first-level cache
/// while its rows are decoded; the last part holds the others: raw and empty rows, and all rows of dict16.
struct Parts<'a> {
    rows: Vec<PlacedRow<'a>>,
    /// Indices of `rows`, part after part.
    order: Vec<u32>,
    ends: [usize; MAX_DICTIONARIES + 1],
}

impl<'a> Parts<'a> {
    fn new(unit: &Unit<'a>) -> Parts<'a> {
        let part = |row: &PlacedRow| match row.codes {
            Row::Fsv8 { dictionary, .. } => dictionary,
            _ => MAX_DICTIONARIES,
        };
        let mut rows = Vec::with_capacity(unit.rows().len());
        let mut ends = [0; MAX_DICTIONARIES + 1];
        for group in unit.groups.clone() {
            rows.extend(unit.view.group_rows(unit.expert, group));
        }
        rows.iter().for_each(|row| ends[part(row)] += 1);
        let mut before = 0;
        for end in &mut ends {
            (*end, before) = (before, before + *end);
        }
        let mut order = vec![0; rows.len()];
        for (i, row) in rows.iter().enumerate() {
            let end = &mut ends[part(row)];
            order[*end] = i as u32;
            *end += 1;
        }
        Parts { rows, order, ends }
    }

    /// The rows of the `i`-th part.
    fn part(&self, i: usize) -> impl Iterator<Item = &PlacedRow<'a>> + Clone {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        self.order[start..self.ends[i]]
            .iter()
            .map(|&row| &self.rows[row as usize])
    }

    fn len(&self) -> usize {
        self.ends.len()
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
    let rows: Vec<&PlacedRow> = (0..parts.len()).flat_map(|i| parts.part(i)).collect();
    let (tokens, first) = (unit.tile.tokens(), unit.rows().start);
    let mut lists: Vec<(&PlacedRow, List)> = Vec::new();
    for placed in rows {
        let out_of_row = (placed.row - first) * tokens;
        match block_table(unit, placed) {
            // SAFETY: the instruction set is available.
            Some(table) if wide => unsafe {
                blocks::row_avx512(unit, placed, table, &mut out[out_of_row..][..tokens])
            },
            // SAFETY: as above.
            Some(table) => unsafe { blocks::row_avx2(unit, placed, table, &mut out[out_of_row..][..tokens]) },
            None => lists.push((placed, List::default())),
        }
    }
    for rows in lists.chunks_mut(LISTED_ROWS) {
        for (placed, list) in rows.iter_mut() {
            list.fill(unit.view, placed.codes);
        }
        add_lists(unit, rows, wide, out);
    }
}

/// Rows decoded before their lists are run over the blocks of tokens, so that a block's values are fetched once for
/// all of them, and few enough for the lists to stay in the second-level cache beside it.
const LISTED_ROWS: usize = 64;

/// The outputs of rows from their lists.
fn add_lists(unit: &Unit, rows: &[(&PlacedRow, List)], wide: bool, out: &mut [f32]) {
    let (tokens, first, reach) = (unit.tile.tokens(), unit.rows().start, reach(unit.view));
    for block in unit.tile.blocks() {
        let values = unit.tile.values(block);
        // `sums` trusts the items: they are below twice the reach, which the values must cover.
        assert!(reach * block.lanes <= values.len());
        for (placed, list) in rows {
            let levels = list.levels(unit.levels(placed.row));
            let out = &mut out[(placed.row - first) * tokens + block.token..][..block.tokens];
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
fn block_table(unit: &Unit, placed: &PlacedRow) -> Option<&'static BlockTable> {
    match (placed.codes, unit.tile.blocks()) {
        (Row::Fsv8 { dictionary, .. }, [block]) => {
            BlockTable::fsv8(usize::from(unit.view.dictionaries()[dictionary]), block.lanes)
        }
        _ => None,
    }
}
