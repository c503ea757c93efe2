//! Portable kernel: every row becomes lists of positions, and the lists pick activations.

use super::drive::Unit;
use super::lists::Lists;
use super::tile::Block;

/// Computes a unit into `out` (rows x tokens).
pub(super) fn rows(unit: &Unit, out: &mut [f32]) {
    let tokens = unit.tile.tokens();
    let mut lists = Lists::default();
    let groups = unit.groups.clone();
    let rows = groups.flat_map(|group| unit.view.group_rows(unit.expert, group));
    for (placed, out) in rows.zip(out.chunks_exact_mut(tokens)) {
        lists.fill(unit.view, placed.codes);
        let levels = unit.levels(placed.row);
        for block in unit.tile.blocks() {
            let out = &mut out[block.token..][..block.tokens];
            let values = unit.tile.values(block);
            match block.lanes {
                1 => out[0] = single(&lists, values, levels),
                4 => add::<4>(&lists, values, levels, out),
                8 => add::<8>(&lists, values, levels, out),
                16 => add::<16>(&lists, values, levels, out),
                _ => add_in_parts(&lists, values, levels, block, out),
            }
        }
    }
}

/// The output of a row for one token. Four partial sums hide the latency of additions.
fn single(lists: &Lists, values: &[f32], (negative, positive): (f32, f32)) -> f32 {
    let sum = |list: &[u32]| {
        let mut sums = [0.0f32; 4];
        let mut fours = list.chunks_exact(4);
        for four in &mut fours {
            for (sum, &at) in sums.iter_mut().zip(four) {
                *sum += values[at as usize];
            }
        }
        for &at in fours.remainder() {
            sums[0] += values[at as usize];
        }
        (sums[0] + sums[1]) + (sums[2] + sums[3])
    };
    negative * sum(lists.negative()) + positive * sum(lists.positive())
}

/// The outputs of a row for a block of LANES tokens.
#[inline(always)]
fn add<const LANES: usize>(lists: &Lists, values: &[f32], (negative, positive): (f32, f32), out: &mut [f32]) {
    let (values, _) = values.as_chunks::<LANES>();
    let sum = |list: &[u32]| {
        let mut sums = [0.0f32; LANES];
        for &at in list {
            for (sum, value) in sums.iter_mut().zip(&values[at as usize]) {
                *sum += value;
            }
        }
        sums
    };
    let (low, high) = (sum(lists.negative()), sum(lists.positive()));
    for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(&high)) {
        *out = negative * low + positive * high;
    }
}

/// Blocks too wide for registers: 16 tokens at a time.
fn add_in_parts(
    lists: &Lists,
    values: &[f32],
    (negative, positive): (f32, f32),
    block: &Block,
    out: &mut [f32],
) {
    for (part, out) in out.chunks_mut(16).enumerate() {
        let sum = |list: &[u32]| {
            let mut sums = [0.0f32; 16];
            for &at in list {
                let values = &values[at as usize * block.lanes + 16 * part..][..16];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += value;
                }
            }
            sums
        };
        let (low, high) = (sum(lists.negative()), sum(lists.positive()));
        for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(&high)) {
            *out = negative * low + positive * high;
        }
    }
}
