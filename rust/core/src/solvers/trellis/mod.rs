//! Dependent codes of least error and length: the cheapest paths through the trellis of
//! [`crate::formats::coded::trellis`], by Viterbi's algorithm.
//!
//! In *fine units*, a quarter of a step, the values of index k are `4 k + 1` in even states and `-(4 k + 1)` in odd
//! ones, which is the code. A state and the parity of the index are an *edge* to the next state. Its codes are 8 fine
//! units apart, so there are four sets of codes, by the parities of the state and of the index. The cost of a path is
//! the sum of `weight * (w - code)^2 + 16 * price * bits(k)` over the columns of a lane; of two edges to a state the
//! cheaper one is kept, or the one with an even index if both cost the same.
//!
//! - [`round`] does not compensate errors. All states share the costs of the four sets, and 64 sequences, four lanes
//!   of 16 rows, are searched in parallel.
//! - [`solve`] compensates errors along each path (`compensated`).
//!
//! Invariants: a row's codes depend only on the documented inputs of the functions; all instruction sets add and
//! multiply in the same order, without fused operations, and find the same codes.
//!
//! Source: trellis-coded quantization (Marcellin and Fischer, 1990); entropy-coded (Fischer and Wang, 1992).

#![allow(clippy::needless_range_loop)] // Indexing elements of vectors is clearest here.

mod cells;
mod compensated;
mod lists;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use rayon::ThreadPool;

use super::priced::{BLOCK_ROWS, Integer, Problem, Quantizer, round_by};
use crate::formats::coded::trellis::NEXT;
use crate::simd::{Isa, vectorized};
use crate::{Error, Result};
use cells::{Cells, FAR, LANES, SEQUENCES};
pub use compensated::{Matrices, Solved, solve};

const STATES: usize = 8;
/// The number of steps after which the lowest cost is subtracted from all, so that costs stay small relative to their
/// differences.
const LEVELLED: usize = 64;
/// The predecessors of a state: one state for each parity of the index.
const FROM: [[usize; 2]; STATES] = {
    let (mut from, mut edge) = ([[0; 2]; STATES], 0);
    while edge < 2 * STATES {
        from[NEXT[edge] as usize][edge % 2] = edge / 2;
        edge += 1;
    }
    from
};

/// A number for each state of 64 sequences.
type Costs = [[f32; SEQUENCES]; STATES];

/// Rounds weights to codes; at most 63 indices have a length. Otherwise like [`super::priced::round`].
///
/// # Errors
/// As [`super::priced::round`].
pub fn round<T: Integer>(problem: Problem, out: &mut [T], isa: Isa, pool: &ThreadPool) -> Result<i32> {
    if !(3..=63).contains(&problem.integers) {
        return invalid(format!(
            "{} indices with lengths: there must be 3 to 63",
            problem.integers
        ));
    }
    round_by::<Cells, T>(problem, out, isa, pool)
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("trellis: {what}")))
}

/// The record of a step, by sequence: the cell of the weight, and one bit per state, the parity of the index that
/// leads there.
#[derive(Clone, Copy)]
struct Step {
    cells: [u16; SEQUENCES],
    parities: [u8; SEQUENCES],
}

impl Quantizer for Cells {
    fn new(bits: &[f32], price: f64) -> Cells {
        Cells::new(bits, price)
    }

    fn round<T: Integer>(
        &self,
        isa: Isa,
        values: &[f32],
        columns: usize,
        inverse: f32,
        out: &mut [T],
    ) -> i32 {
        let none = Step {
            cells: [0; SEQUENCES],
            parities: [0; SEQUENCES],
        };
        let (fine, mut steps) = (4.0 * inverse, vec![none; columns.div_ceil(LANES)]);
        let mut states = [0; SEQUENCES];
        search(isa, self, values, columns, fine, &mut steps, &mut states);
        self.trace(values, columns, fine, &steps, states, out)
    }
}

vectorized! {
    /// Searches the paths of a row block's weights, in fine units; returns the final states.
    fn search(
        cells: &Cells, values: &[f32], columns: usize, fine: f32, steps: &mut [Step], states: &mut [u8; SEQUENCES],
    ) = search_portable;
}

#[inline(always)]
fn search_portable(
    cells: &Cells,
    values: &[f32],
    columns: usize,
    fine: f32,
    steps: &mut [Step],
    states: &mut [u8; SEQUENCES],
) {
    let (mut costs, mut next) = ([[f32::INFINITY; SEQUENCES]; STATES], [[0.0; SEQUENCES]; STATES]);
    costs[0] = [0.0; SEQUENCES];
    for (number, step) in steps.iter_mut().enumerate() {
        let mut units = [0.0; SEQUENCES];
        let width = (columns - LANES * number).min(LANES);
        for (row, units) in values.chunks_exact(columns).zip(units.chunks_exact_mut(LANES)) {
            let row = &row[LANES * number..][..width];
            units
                .iter_mut()
                .zip(row)
                .for_each(|(unit, value)| *unit = value * fine);
        }
        let mut edges = cells.edges(&units, &mut step.cells);
        if width < LANES {
            // Sequences that have ended.
            let ended = |edges: &mut [f32; SEQUENCES]| {
                edges
                    .chunks_exact_mut(LANES)
                    .for_each(|row| row[width..].fill(0.0));
            };
            edges.iter_mut().for_each(ended);
        }
        advance(&costs, &edges, &mut next, &mut step.parities);
        std::mem::swap(&mut costs, &mut next);
        if number % LEVELLED == LEVELLED - 1 {
            level(&mut costs);
        }
    }
    for (sequence, state) in states.iter_mut().enumerate() {
        *state = cheapest(|state| costs[state][sequence]) as u8;
    }
}

/// The first of the states of lowest cost.
#[inline(always)]
fn cheapest(cost: impl Fn(usize) -> f32) -> usize {
    (1..STATES).fold(
        0,
        |best, state| if cost(state) < cost(best) { state } else { best },
    )
}

/// Extends every sequence by a step.
#[inline(always)]
fn advance(costs: &Costs, edges: &[[f32; SEQUENCES]; 4], next: &mut Costs, parities: &mut [u8; SEQUENCES]) {
    for i in 0..SEQUENCES {
        let mut found = 0u32;
        for (to, [even, odd]) in FROM.into_iter().enumerate() {
            let (even, odd) = (
                costs[even][i] + edges[2 * (even % 2)][i],
                costs[odd][i] + edges[2 * (odd % 2) + 1][i],
            );
            next[to][i] = if odd < even { odd } else { even };
            found |= u32::from(odd < even) << to;
        }
        parities[i] = found as u8;
    }
}

/// Subtracts the lowest cost of each sequence from all of its costs.
#[inline(always)]
fn level(costs: &mut Costs) {
    for i in 0..SEQUENCES {
        let least = costs
            .iter()
            .fold(f32::INFINITY, |least, costs| least.min(costs[i]));
        costs.iter_mut().for_each(|costs| costs[i] -= least);
    }
}

impl Cells {
    /// Traces the paths back from their final states and writes their codes; returns the largest magnitude.
    fn trace<T: Integer>(
        &self,
        values: &[f32],
        columns: usize,
        fine: f32,
        steps: &[Step],
        mut states: [u8; SEQUENCES],
        out: &mut [T],
    ) -> i32 {
        let mut largest = 0;
        for (number, step) in steps.iter().enumerate().rev() {
            let width = (columns - LANES * number).min(LANES);
            for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                for (lane, sequence) in (LANES * row..).take(LANES).enumerate() {
                    let to = usize::from(states[sequence]);
                    let parity = usize::from(step.parities[sequence] >> to & 1);
                    let from = FROM[to][parity];
                    states[sequence] = from as u8;
                    if lane < width {
                        let place = LANES * number + lane;
                        let code = match step.cells[sequence] {
                            FAR => cells::nearest(values[columns * row + place] * fine, from % 2, parity),
                            cell => self.code(cell, from % 2, parity),
                        };
                        largest = largest.max(code.abs());
                        out[place] = T::narrowed(code);
                    }
                }
            }
        }
        largest
    }
}
