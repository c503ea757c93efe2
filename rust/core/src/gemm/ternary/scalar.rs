//! Portable kernels.
//!
//! One token: every slot of a code's word is one product, with zero for unused slots. More tokens: every row is
//! decoded to a list, whose items select and multiply the activations of at most 16 tokens at a time.

use super::lists::List;
use super::tile::TokenBlock;
use super::unit::Unit;
use crate::formats::ternary::Row;
use crate::formats::ternary::fsv8::Lut;

/// Computes a unit into `out` (rows x tokens).
pub(super) fn rows(unit: &Unit, out: &mut [f32]) {
    let tokens = unit.tile.tokens();
    let mut list = List::default();
    let groups = unit.groups.clone();
    let rows = groups.flat_map(|group| unit.view.group_rows(unit.expert, group));
    for (placed, out) in rows.zip(out.chunks_exact_mut(tokens)) {
        let levels = unit.levels(placed.row);
        if let (Row::Fsv8 { .. }, 1) = (placed.codes, tokens) {
            out[0] = walk(unit, placed.codes, levels);
            continue;
        }
        list.fill(unit.view, placed.codes);
        let (items, levels) = (list.items(), list.levels(levels));
        for block in unit.tile.blocks() {
            let out = &mut out[block.token..][..block.tokens];
            let values = unit.tile.values(block);
            match block.lanes {
                1 => out[0] = single(items, values, levels),
                4 => add::<4>(items, values, levels, out),
                8 => add::<8>(items, values, levels, out),
                _ => add_wide(items, values, levels, block, out),
            }
        }
    }
}

/// The output of an FSV8 row for one token, without a list.
fn walk(unit: &Unit, row: Row, (negative, positive): (f32, f32)) -> f32 {
    let Row::Fsv8 {
        codes,
        dictionary,
        swapped,
    } = row
    else {
        return 0.0;
    };
    let levels = match swapped {
        false => [0.0, negative, positive, 0.0],
        true => [0.0, positive, negative, 0.0],
    };
    let values = unit.tile.values(&unit.tile.blocks()[0]);
    let lut = Lut::embedded(usize::from(unit.view.dictionaries()[dictionary]));
    let columns = unit.view.columns();
    match (lut.three_slots, lut.class_bits) {
        (false, 2) => walk_codes::<2, 8, 2>(codes, lut, values, levels, columns),
        (false, _) => walk_codes::<2, 8, 3>(codes, lut, values, levels, columns),
        (true, 2) => walk_codes::<3, 5, 2>(codes, lut, values, levels, columns),
        (true, _) => walk_codes::<3, 5, 3>(codes, lut, values, levels, columns),
    }
}

/// The output of a row's codes for one token; `values` has zeros for one word of `lut` after the last column.
#[inline(always)]
fn walk_codes<const SLOTS: usize, const BITS: usize, const CLASS: usize>(
    codes: &[u8],
    lut: &Lut,
    values: &[f32],
    levels: [f32; 4],
    columns: usize,
) -> f32 {
    let entries = &lut.entries[..256 << CLASS];
    let (mut at, mut previous, mut sums) = (0, 0, [0.0; SLOTS]);
    for &code in codes {
        let entry = entries[usize::from(code) << CLASS | usize::from(previous) >> (8 - CLASS)];
        for (slot, sum) in sums.iter_mut().enumerate() {
            let position = at + (entry >> (BITS * slot) & ((1 << BITS) - 1)) as usize;
            *sum += levels[(entry >> (16 + 2 * slot) & 3) as usize] * values[position];
        }
        at = (at + (entry >> 24) as usize).min(columns);
        previous = code;
    }
    sums.iter().sum()
}

/// The output of a row for one token from its list. Four partial sums hide the latency of additions.
fn single(items: &[u32], values: &[f32], levels: [f32; 2]) -> f32 {
    let product = |item: u32| levels[(item & 1) as usize] * values[(item >> 1) as usize];
    let mut sums = [0.0f32; 4];
    let (fours, rest) = items.as_chunks::<4>();
    for four in fours {
        for (sum, &item) in sums.iter_mut().zip(four) {
            *sum += product(item);
        }
    }
    for (sum, &item) in sums.iter_mut().zip(rest) {
        *sum += product(item);
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// The outputs of a row for a token block of LANES lanes.
#[inline(always)]
fn add<const LANES: usize>(items: &[u32], values: &[f32], levels: [f32; 2], out: &mut [f32]) {
    let (values, _) = values.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for &item in items {
        let level = levels[(item & 1) as usize];
        for (sum, value) in sums.iter_mut().zip(&values[(item >> 1) as usize]) {
            *sum += level * value;
        }
    }
    out.copy_from_slice(&sums[..out.len()]);
}

/// The outputs of a row for a token block that is too wide for registers: 16 tokens at a time.
fn add_wide(items: &[u32], values: &[f32], levels: [f32; 2], block: &TokenBlock, out: &mut [f32]) {
    for (part, out) in out.chunks_mut(16).enumerate() {
        let mut sums = [0.0f32; 16];
        for &item in items {
            let level = levels[(item & 1) as usize];
            let values = &values[(item >> 1) as usize * block.lanes + 16 * part..][..16];
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += level * value;
            }
        }
        out.copy_from_slice(&sums[..out.len()]);
    }
}
