//! Chooses dictionaries: up to eight for a tensor, then one of them for each row.
//!
//! The number of codes of a row with a dictionary is estimated as the cross-entropy of the row's symbols under the
//! dictionary's design probabilities, divided by the bits that one of its codes represents. Costs are integers, so that
//! sums and choices are the same on every machine.

use std::sync::OnceLock;

use super::fsv8::{COUNT, Dictionary};
use super::layout::MAX_DICTIONARIES;
use super::scan::Counts;

/// The cost of one code.
const CODE: u64 = 1 << 20;

/// The number of sampled rows for choosing a tensor's dictionaries; more would not change the choice measurably.
pub(super) const SAMPLE_ROWS: usize = 1024;

/// A dictionary is added only if it saves more than 1/2000 of the cost, because each change of table costs kernels
/// time. Tensors with statistically independent weights then use a single dictionary; trying three dictionaries per row
/// would gain 0.2 % and take twice as long.
const LEAST_GAIN: u64 = 2000;

/// For each row, all dictionaries whose estimate is at most 1/200 above the lowest are tried.
const NEAR: u64 = 200;

/// The maximum number of dictionaries that are tried for a row.
const MAX_TRIES: usize = 3;

/// The cost of each of the symbols 0, 1 and 2 with a dictionary.
type Costs = [u64; 3];

fn costs() -> &'static [Costs; COUNT] {
    static COSTS: OnceLock<[Costs; COUNT]> = OnceLock::new();
    COSTS.get_or_init(|| std::array::from_fn(|id| costs_of(&Dictionary::all()[id])))
}

fn costs_of(dictionary: &Dictionary) -> Costs {
    let probabilities = dictionary.probabilities();
    let entropy: f64 = probabilities.iter().map(|p| -p * p.log2()).sum();
    let codes_per_bit = 1e4 / (f64::from(dictionary.expected_length) * entropy);
    probabilities.map(|p| (-p.log2() * codes_per_bit * CODE as f64).round() as u64)
}

fn cost(costs: &Costs, columns: usize, counts: Counts) -> u64 {
    // Every dictionary has P(1) >= P(2); a row whose positive weights are more frequent swaps the symbols.
    let often = u64::from(counts.negative.max(counts.positive));
    let seldom = u64::from(counts.negative.min(counts.positive));
    (columns as u64 - often - seldom) * costs[0] + often * costs[1] + seldom * costs[2]
}

fn raw_cost(columns: usize) -> u64 {
    columns.div_ceil(4) as u64 * CODE
}

/// Chooses the dictionaries of a tensor from its rows or a sample of them, greedily by the largest saving. Returns
/// their ids in ascending order, at least one.
pub(super) fn for_tensor(columns: usize, rows: &[Counts]) -> Vec<u8> {
    let costs = costs();
    let mut best = vec![raw_cost(columns); rows.len()];
    let mut chosen = Vec::new();
    while chosen.len() < MAX_DICTIONARIES {
        let total_with = |id: usize| {
            let each = rows
                .iter()
                .zip(&best)
                .map(|(&counts, &best)| best.min(cost(&costs[id], columns, counts)));
            each.sum::<u64>()
        };
        let (total, id) = (0..COUNT)
            .map(|id| (total_with(id), id))
            .min()
            .unwrap_or_default();
        let before: u64 = best.iter().sum();
        if !chosen.is_empty() && before - total <= before / LEAST_GAIN {
            break;
        }
        chosen.push(id as u8);
        for (best, &counts) in best.iter_mut().zip(rows) {
            *best = (*best).min(cost(&costs[id], columns, counts));
        }
    }
    chosen.sort_unstable();
    chosen
}

/// Lists the dictionaries (as indices into `chosen`) to try for a row, the lowest estimate first; none if even the
/// best estimate is clearly longer than a raw row.
pub(super) fn for_row(columns: usize, counts: Counts, chosen: &[u8], out: &mut Vec<usize>) {
    let costs = costs();
    let cost_of = |slot: usize| cost(&costs[usize::from(chosen[slot])], columns, counts);
    out.clear();
    out.extend(0..chosen.len());
    out.sort_by_key(|&slot| cost_of(slot));
    let least = cost_of(out[0]);
    if least > raw_cost(columns) + raw_cost(columns) / 4 {
        out.clear();
        return;
    }
    out.retain(|&slot| cost_of(slot) <= least + least / NEAR);
    out.truncate(MAX_TRIES);
}
