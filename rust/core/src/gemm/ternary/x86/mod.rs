//! Ternary kernels for x86-64 with AVX2 or AVX-512.
//!
//! One token: [`walk`]. Two to 32 tokens of a two-slot dictionary: [`blocks`]. Everything else, mainly more tokens:
//! rows are decoded to lists once, and [`sums`] multiplies them by each token block.

mod blocks;
mod sums;
mod unit_rows;
mod vector;
mod walk;

use super::lists::{List, position_bound};
use super::table::BlockTable;
use super::unit::Unit;
use crate::simd::Isa;
use unit_rows::{OTHERS, RowsByDictionary, UnitRow};

/// The instructions that a kernel may use, and whether it loads table entries several codes ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// AVX2, FMA, BMI1 and BMI2.
    Avx2 { ahead: bool },
    /// AVX-512, and the instructions of [`Variant::Avx2`].
    Avx512 { ahead: bool },
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
    let sorted = RowsByDictionary::new(unit);
    let tokens = unit.tile.tokens();
    let mut listed = Vec::new();
    for row in &sorted.rows {
        let out = &mut out[usize::from(row.number) * tokens..][..tokens];
        match block_table(unit, row) {
            // SAFETY: the instruction set is available.
            Some(table) if wide => unsafe { blocks::row_avx512(unit, row, table, out) },
            // SAFETY: as above.
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
        add_lists(unit, rows, &lists, wide, out);
    }
}

/// The number of rows decoded before their lists are multiplied by the token blocks: a block's values are then loaded
/// into the second-level cache once for all of them, and the lists fit the cache, too.
const LISTED_ROWS: usize = 64;

/// Writes the outputs of rows from their lists.
fn add_lists(unit: &Unit, rows: &[UnitRow], lists: &[List], wide: bool, out: &mut [f32]) {
    let (tokens, bound) = (unit.tile.tokens(), position_bound(unit.view));
    for block in unit.tile.blocks() {
        let values = unit.tile.values(block);
        // `sums` relies on the items being below twice the bound, which the values must cover.
        assert!(bound * block.lanes <= values.len());
        for (row, list) in rows.iter().zip(lists) {
            let levels = list.levels(row.levels(unit));
            let out = &mut out[usize::from(row.number) * tokens + block.token..][..block.tokens];
            match wide {
                // SAFETY: as asserted; `rows` has checked that the instruction set is available.
                true => unsafe { sums::block_avx512(list.items(), values, block.lanes, levels, out) },
                // SAFETY: as above.
                false => unsafe { sums::block_avx2(list.items(), values, block.lanes, levels, out) },
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
