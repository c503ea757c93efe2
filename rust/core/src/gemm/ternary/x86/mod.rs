//! Ternary kernels for x86-64 with AVX2 or AVX-512.
//!
//! One token: [`walk`]. Two to 32 tokens of a two-slot dictionary: [`blocks`]. Everything else, mainly more tokens:
//! rows are decoded to lists once, and [`sums`] multiplies them by each token block.

mod blocks;
mod sums;
mod unit_rows;
mod vector;
mod walk;

use super::Kernel;
use super::lists::{List, position_bound};
use super::table::BlockTable;
use super::unit::Unit;
use crate::simd::{Isa, Kind};
use unit_rows::{OTHERS, RowsByDictionary, UnitRow};

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
