//! The best code of each set, and the cost of its length, by position.
//!
//! The line is divided into cells of a quarter of a fine unit, each with the codes of lowest cost at its centre: one
//! lookup per weight instead of eight. Two codes of a set are eight fine units apart, so more accurate borders
//! between them would not change any path that is good overall.

use crate::solvers::priced::BLOCK_ROWS;

/// Weights in fine units are clamped to this value, because codes are at most 2^30 in magnitude.
pub(super) const MOST: f32 = ((1 << 30) - 64) as f32;
/// The number of sequences of a row.
pub(super) const LANES: usize = 4;
/// The number of sequences searched in parallel.
pub(super) const SEQUENCES: usize = LANES * BLOCK_ROWS;

/// The cell of weights beyond all codes with a length: they take the nearest codes, whose lengths are not counted.
pub(super) const FAR: u16 = u16::MAX;
/// The number of cells per fine unit.
const CELLS: f32 = 4.0;
/// The exclusive bound of codes with a length.
const REACH: i32 = 128;
/// The number of cells on either side of the one around zero.
const HALF: usize = REACH as usize * CELLS as usize;
/// A number this large has no fractions in f32: sums with it are rounded to the nearest integer, ties to even.
const WHOLE: f32 = (1 << 23) as f32;
/// The number of indices of a set tried on either side of the nearest one.
const ASIDE: i32 = 4;

/// Invariant: `entries` has `2 * HALF + 1` elements. Those of far weights are zero, and their cost is never used.
pub(super) struct Cells {
    /// Indexed by twice the parity of the state plus that of the index: the code in the low byte, and above it the
    /// cost of the code's length, an f32 without its last eight bits.
    entries: Vec<[u32; 4]>,
    /// The magnitude above which weights are far.
    reach: f32,
}

impl Cells {
    /// The cells for the lengths of the indices from -L to L, L at most 31, at a price in squared steps.
    pub(super) fn new(bits: &[f32], price: f64) -> Cells {
        let costs: Vec<f32> = bits
            .iter()
            .map(|&bits| (16.0 * price * f64::from(bits)) as f32)
            .collect();
        let reach = 2.0 * (bits.len() as f32 + 1.0);
        // A weight at the reach is at most half a cell from the centre of its own.
        let most = ((reach * CELLS) as usize + 1).min(HALF);
        let mut entries = vec![[0; 4]; 2 * HALF + 1];
        for cell in HALF - most..=HALF + most {
            let unit = (cell as f32 - HALF as f32) / CELLS;
            for parity in 0..2 {
                let (code, cost) = cheapest(&costs, unit, parity);
                let entry = |code: i32| cost.to_bits() & !0xff | u32::from(code as u8);
                entries[cell][parity] = entry(code);
                entries[2 * HALF - cell][2 + parity] = entry(-code);
            }
        }
        Cells { entries, reach }
    }

    /// The costs of the four sets for weights in fine units, and their cells.
    #[inline(always)]
    pub(super) fn edges(
        &self,
        units: &[f32; SEQUENCES],
        cells: &mut [u16; SEQUENCES],
    ) -> [[f32; SEQUENCES]; 4] {
        let mut most = 0;
        for (unit, cell) in units.iter().zip(&mut *cells) {
            let place = unit.clamp(-REACH as f32, REACH as f32) * CELLS + (WHOLE + HALF as f32);
            *cell = place.to_bits() as u16;
            most = most.max(unit.abs().to_bits());
        }
        let mut entries = [[0; SEQUENCES]; 4];
        for (i, &cell) in cells.iter().enumerate() {
            let found = &self.entries[usize::from(cell)];
            (0..4).for_each(|set| entries[set][i] = found[set]);
        }
        let mut edges = [[0.0; SEQUENCES]; 4];
        for (edges, entries) in edges.iter_mut().zip(&entries) {
            for ((edge, &entry), unit) in edges.iter_mut().zip(entries).zip(units) {
                let error = unit - (((entry << 24) as i32) >> 24) as f32;
                *edge = error * error + f32::from_bits(entry & !0xff);
            }
        }
        if f32::from_bits(most) > self.reach {
            self.far(units, cells, &mut edges);
        }
        edges
    }

    /// Replaces the cells and costs of far weights.
    fn far(&self, units: &[f32; SEQUENCES], cells: &mut [u16; SEQUENCES], edges: &mut [[f32; SEQUENCES]; 4]) {
        for (i, &unit) in units
            .iter()
            .enumerate()
            .filter(|(_, unit)| unit.abs() > self.reach)
        {
            cells[i] = FAR;
            for (set, edges) in edges.iter_mut().enumerate() {
                // A difference of large numbers may be inexact, but not large.
                let error =
                    (unit.clamp(-MOST, MOST) - nearest(unit, set / 2, set % 2) as f32).clamp(-8.0, 8.0);
                edges[i] = error * error;
            }
        }
    }

    /// The code of a set in a cell.
    #[inline(always)]
    pub(super) fn code(&self, cell: u16, state: usize, parity: usize) -> i32 {
        (self.entries[usize::from(cell)][2 * state + parity] as u8 as i8).into()
    }
}

/// The code of an even state with the lowest cost for a weight, by the parity of its index, and the cost of its
/// length.
fn cheapest(costs: &[f32], unit: f32, parity: usize) -> (i32, f32) {
    let largest = costs.len() as i32 / 2;
    // The largest index of the parity.
    let last = largest - (largest + parity as i32) % 2;
    let near = (nearest(unit, 0, parity) >> 2).clamp(-last, last);
    let mut index = (near - 2 * ASIDE).max(-last);
    let (mut best, mut least) = (index, f32::INFINITY);
    while index <= (near + 2 * ASIDE).min(last) {
        let total = (unit - (4 * index + 1) as f32).powi(2) + costs[(index + largest) as usize];
        (best, least) = if total < least {
            (index, total)
        } else {
            (best, least)
        };
        index += 2;
    }
    (4 * best + 1, costs[(best + largest) as usize])
}

/// The nearest code of a set, by the parities of the state and of the index, at most 2^30 in magnitude.
pub(super) fn nearest(unit: f32, state: usize, parity: usize) -> i32 {
    let unit = if state == 0 { unit } else { -unit }.clamp(-MOST, MOST);
    let first = 1 + 4 * parity as i32;
    let code = 8 * ((unit - first as f32) / 8.0).round_ties_even() as i32 + first;
    if state == 0 { code } else { -code }
}
