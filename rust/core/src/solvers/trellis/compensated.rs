//! GPTQ along each path (per-survivor processing: Raheli, Polydoros and Tzou, 1995).
//!
//! A column's error is spread over the columns that are still free (python/moepack/solvers/gptq.py), so each path has
//! its own weights there. Columns are visited lane by lane. After [`BLOCK`] of them, or at the end of a lane, the
//! cheapest path is fixed and its errors are spread over all later columns.
//!
//! 16 rows are searched in parallel, one per vector element: a state's paths come from one of two states, so the
//! weights of its path are selected from two vectors, row by row, and nothing moves between elements.

#![allow(clippy::needless_range_loop)] // Indexing elements of vectors is clearest here.

use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::lists::{Lists, MOST_INDICES};
use super::{BLOCK_ROWS as ROWS, FROM, LANES, STATES, cheapest, invalid};
use crate::Result;
use crate::simd::{Isa, vectorized};

/// The maximum number of columns after which a path is fixed. The work on free columns grows with it.
const BLOCK: usize = 32;
/// Compensated weights in fine units are clamped to this value, beyond which a search is lost anyway.
const MOST: f32 = (1 << 25) as f32;
/// The number of groups of 16 rows that read the factors together.
const GROUPS: usize = 4;
/// The number of later columns whose factors are copied together: a cache line.
const TILE: usize = 16;
/// The number of later columns whose sums stay in registers.
const SUMS: usize = 4;

/// One value for each row.
type Column = [f32; ROWS];
/// One value for each state and row.
type Survivors = [[f32; ROWS]; STATES];

/// Matrices, and the costs of their codes.
#[derive(Debug, Clone, Copy)]
pub struct Matrices<'a> {
    /// Experts E, rows R and columns C.
    pub shape: [usize; 3],
    /// E x R x C.
    pub weights: &'a [f32],
    /// The value of four fine units.
    pub step: f64,
    /// E x C x C, F of the factorised Hessians, rows and columns in the order of visits.
    pub upper: &'a [f32],
    /// E x C, in the order of visits; a squared error in fine units is weighted by its square.
    pub pivots: &'a [f32],
    /// The cost of a bit in squared steps for a pivot of 1, per expert.
    pub prices: &'a [f32],
    /// N x (2 L + 3), the bits of the indices from -L - 1 to L + 1; the ends include all beyond.
    pub lengths: &'a [f32],
    /// The lengths of a list, 2 L + 3, at most 127.
    pub indices: usize,
    /// E x R, the list of each row.
    pub runs: &'a [i64],
}

/// The solution.
#[derive(Debug, Clone, PartialEq)]
pub struct Solved {
    /// E x R x C.
    pub codes: Vec<i32>,
    /// E x C in the order of visits: over all rows, the squared pivot times the squared error of the compensated
    /// weights, in squared fine units. Not finite if compensation overflows.
    pub losses: Vec<f64>,
}

/// Finds the codes.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] if sizes do not match, a number is out of range, or a weight is NaN or infinite.
pub fn solve(matrices: Matrices, isa: Isa, pool: &ThreadPool) -> Result<Solved> {
    let isa = isa.vectors();
    check(&matrices)?;
    let [experts, rows, columns] = matrices.shape;
    let (mut codes, unit) = (
        vec![0; experts * rows * columns],
        (GROUPS * ROWS * columns).max(1),
    );
    let by_expert = codes.par_chunks_mut((rows * columns).max(1)).enumerate();
    let mut losses: Vec<f64> = pool.install(|| {
        let losses = by_expert.flat_map_iter(|(expert, codes)| {
            let expert = Expert::new(isa, &matrices, expert);
            let units = codes.par_chunks_mut(unit).enumerate();
            let parts: Vec<_> = units
                .map(|(number, codes)| expert.solve(number * GROUPS * ROWS, codes))
                .collect();
            (0..columns).map(move |column| parts.iter().map(|part| part[column]).sum())
        });
        losses.collect()
    });
    losses.resize(experts * columns, 0.0);
    Ok(Solved { codes, losses })
}

/// Checks the arguments.
fn check(matrices: &Matrices) -> Result<()> {
    let Matrices {
        shape: [experts, rows, columns],
        weights,
        runs,
        indices,
        lengths,
        ..
    } = *matrices;
    let sizes = [
        ("weights", weights.len(), experts * rows * columns),
        ("factors", matrices.upper.len(), experts * columns * columns),
        ("pivots", matrices.pivots.len(), experts * columns),
        ("prices", matrices.prices.len(), experts),
        ("runs", runs.len(), experts * rows),
    ];
    if let Some((name, found, wanted)) = sizes.into_iter().find(|(_, found, wanted)| found != wanted) {
        return invalid(format!("{found} {name} instead of {wanted}"));
    }
    if !(5..=MOST_INDICES).contains(&indices)
        || indices % 2 == 0
        || lengths.is_empty()
        || !lengths.len().is_multiple_of(indices)
    {
        return invalid(format!(
            "{} lengths do not form lists of {indices}",
            lengths.len()
        ));
    }
    if runs
        .iter()
        .any(|&run| usize::try_from(run).map_or(true, |run| run >= lengths.len() / indices))
    {
        return invalid("a row refers to a list of lengths that does not exist");
    }
    let inverse = (1.0 / matrices.step) as f32;
    if !(inverse.is_normal() && inverse > 0.0) {
        return invalid(format!("step {} must be positive", matrices.step));
    }
    match weights.iter().all(|weight| weight.is_finite()) {
        true => Ok(()),
        false => invalid("NaN or infinite weights"),
    }
}

/// The shared data of an expert's rows.
struct Expert<'a> {
    isa: Isa,
    /// The number of fine units in 1.
    fine: f32,
    /// The cost of a bit in squared fine units.
    price: f32,
    weights: &'a [f32],
    upper: &'a [f32],
    pivots: &'a [f32],
    /// By row.
    runs: &'a [i64],
    /// By run and index.
    lengths: &'a [f32],
    indices: usize,
}

/// 16 rows that are solved in parallel; columns in the order of visits.
struct Group {
    /// Weights in fine units, the same after compensation for fixed columns, and the errors of fixed columns.
    source: Vec<Column>,
    work: Vec<Column>,
    errors: Vec<Column>,
    codes: Vec<[i32; ROWS]>,
    states: [u8; ROWS],
    lists: Lists,
}

/// The record of a column for each state and row: the code that leads there, and whether its index is odd.
#[derive(Clone, Copy)]
struct Step {
    codes: [[i32; ROWS]; STATES],
    odd: [[u32; ROWS]; STATES],
}

impl<'a> Expert<'a> {
    fn new(isa: Isa, matrices: &Matrices<'a>, number: usize) -> Expert<'a> {
        let [_, rows, columns] = matrices.shape;
        let part = |all: &'a [f32], size: usize| &all[number * size..][..size];
        Expert {
            isa,
            fine: (4.0 / matrices.step) as f32,
            price: 16.0 * matrices.prices[number],
            weights: part(matrices.weights, rows * columns),
            upper: part(matrices.upper, columns * columns),
            pivots: part(matrices.pivots, columns),
            runs: &matrices.runs[number * rows..][..rows],
            lengths: matrices.lengths,
            indices: matrices.indices,
        }
    }

    fn columns(&self) -> usize {
        self.pivots.len()
    }

    /// Solves rows from `first` on; returns the losses of columns.
    fn solve(&self, first: usize, codes: &mut [i32]) -> Vec<f64> {
        let columns = self.columns();
        let last = first + codes.len() / columns;
        let rows = (first..last).step_by(ROWS);
        let mut groups: Vec<Group> = rows.map(|row| self.group(row..last.min(row + ROWS))).collect();
        let mut start = 0;
        for lane in 0..LANES {
            let end = start + (columns + LANES - 1 - lane) / LANES;
            groups.iter_mut().for_each(|group| group.states = [0; ROWS]);
            while start < end {
                let stop = end.min(start + BLOCK);
                groups
                    .iter_mut()
                    .for_each(|group| block(self.isa, self, group, start, stop));
                spread(self.isa, self, &mut groups, start, stop);
                start = stop;
            }
        }
        let mut losses = vec![0.0; columns];
        for (group, codes) in groups.iter().zip(codes.chunks_mut(ROWS * columns)) {
            group.finish(self.pivots, codes, &mut losses);
        }
        losses
    }

    fn group(&self, rows: Range<usize>) -> Group {
        let columns = self.columns();
        let lists = Lists::new(&self.runs[rows.clone()], self.lengths, self.indices, self.price);
        let mut source = vec![[0.0; ROWS]; columns];
        for (i, row) in rows.enumerate() {
            let weights = &self.weights[row * columns..][..columns];
            for (place, column) in visits(columns).enumerate() {
                source[place][i] = weights[column] * self.fine;
            }
        }
        Group {
            work: source.clone(),
            source,
            errors: vec![[0.0; ROWS]; columns],
            codes: vec![[0; ROWS]; columns],
            states: [0; ROWS],
            lists,
        }
    }

    /// The better code of an even state with an index of a parity, out of the nearest and the next one towards zero,
    /// and the costs. Odd states negate `units` and codes.
    #[inline(always)]
    fn edges(&self, lists: &Lists, weight: f32, units: &Column, parity: i32) -> ([i32; ROWS], Column) {
        let (mut codes, mut costs) = ([0; ROWS], [0.0; ROWS]);
        for i in 0..ROWS {
            codes[i] = 2 * whole((units[i] - (1 + 4 * parity) as f32) * 0.125) + parity;
        }
        let [outer, inner] = lists.costs(self.isa, &codes);
        for i in 0..ROWS {
            let index = codes[i];
            let (code, next) = (4 * index + 1, 4 * index + if index > 0 { -7 } else { 9 });
            let (error, next_error) = (units[i] - code as f32, units[i] - next as f32);
            let cost = error * error * weight + outer[i];
            let next_cost = next_error * next_error * weight + inner[i];
            codes[i] = if next_cost < cost { next } else { code };
            costs[i] = if next_cost < cost { next_cost } else { cost };
        }
        (codes, costs)
    }
}

/// Clamps a number to 2^25 in magnitude; NaN also becomes such a number.
#[inline(always)]
fn cut_off(unit: f32) -> f32 {
    let unit = if unit > -MOST { unit } else { -MOST };
    if unit < MOST { unit } else { MOST }
}

/// The nearest integer of a number of at most 2^22 in magnitude, ties to even, in operations that vectorize.
#[inline(always)]
fn whole(value: f32) -> i32 {
    /// A number this large has no fractions.
    const WHOLE: f32 = (3 << 22) as f32;
    (value + WHOLE).to_bits() as i32 - WHOLE.to_bits() as i32
}

/// Columns in the order of visits.
fn visits(columns: usize) -> impl Iterator<Item = usize> {
    (0..LANES).flat_map(move |lane| (lane..columns).step_by(LANES))
}

vectorized! {
    /// Fixes some columns of a lane.
    fn block(expert: &Expert, group: &mut Group, start: usize, stop: usize) = block_portable;
}

#[inline(always)]
fn block_portable(expert: &Expert, group: &mut Group, start: usize, stop: usize) {
    let mut costs = [[f32::INFINITY; ROWS]; STATES];
    for (row, &state) in group.states.iter().enumerate() {
        costs[usize::from(state)][row] = 0.0;
    }
    let mut free = [[[0.0; ROWS]; STATES]; BLOCK];
    for (free, work) in free.iter_mut().zip(&group.work[start..stop]) {
        *free = [*work; STATES];
    }
    let none = Step {
        codes: [[0; ROWS]; STATES],
        odd: [[0; ROWS]; STATES],
    };
    let mut steps = [none; BLOCK];
    for column in start..stop {
        let (done, rest) = free.split_at_mut(column - start + 1);
        let step = &mut steps[column - start];
        advance(expert, group, column, &done[column - start], &mut costs, step);
        let source = &group.source[column];
        let errors: Survivors = step
            .codes
            .each_ref()
            .map(|codes| std::array::from_fn(|i| source[i] - codes[i] as f32));
        let factors = &expert.upper[column * expert.columns()..][column + 1..stop];
        for (free, &factor) in rest.iter_mut().zip(factors) {
            take_over(free, &step.odd, &errors, factor);
        }
    }
    for row in 0..ROWS {
        let mut state = cheapest(|state| costs[state][row]);
        group.states[row] = state as u8;
        for column in (start..stop).rev() {
            let step = &steps[column - start];
            group.codes[column][row] = step.codes[state][row];
            state = FROM[state][step.odd[state][row] as usize];
        }
    }
}

/// Extends all paths by a column.
#[inline(always)]
fn advance(
    expert: &Expert,
    group: &Group,
    column: usize,
    free: &Survivors,
    costs: &mut Survivors,
    step: &mut Step,
) {
    let weight = expert.pivots[column] * expert.pivots[column];
    let mut next = [[0.0; ROWS]; STATES];
    let (mut totals, mut codes) = ([[[0.0; ROWS]; STATES]; 2], [[[0; ROWS]; STATES]; 2]);
    for from in 0..STATES {
        let odd = from % 2 != 0;
        let units = free[from].map(|unit| cut_off(if odd { -unit } else { unit }));
        for parity in 0..2 {
            let (found, edges) = expert.edges(&group.lists, weight, &units, parity as i32);
            codes[parity][from] = found.map(|code| if odd { -code } else { code });
            for i in 0..ROWS {
                totals[parity][from][i] = costs[from][i] + edges[i];
            }
        }
    }
    for (to, [even, odd]) in FROM.into_iter().enumerate() {
        for i in 0..ROWS {
            let better = totals[1][odd][i] < totals[0][even][i];
            next[to][i] = if better {
                totals[1][odd][i]
            } else {
                totals[0][even][i]
            };
            step.codes[to][i] = if better {
                codes[1][odd][i]
            } else {
                codes[0][even][i]
            };
            step.odd[to][i] = u32::from(better);
        }
    }
    *costs = next;
}

/// Updates a free column: each path takes the weight of its predecessor plus its error.
#[inline(always)]
fn take_over(free: &mut Survivors, odd: &[[u32; ROWS]; STATES], errors: &Survivors, factor: f32) {
    for i in 0..ROWS {
        let old: [f32; STATES] = std::array::from_fn(|state| free[state][i]);
        for (to, from) in FROM.into_iter().enumerate() {
            let own = if odd[to][i] != 0 {
                old[from[1]]
            } else {
                old[from[0]]
            };
            free[to][i] = own + errors[to][i] * factor;
        }
    }
}

vectorized! {
    /// Spreads the errors of a block's fixed codes over all later columns, in the order of visits.
    fn spread(expert: &Expert, groups: &mut [Group], start: usize, stop: usize) = spread_portable;
}

#[inline(always)]
fn spread_portable(expert: &Expert, groups: &mut [Group], start: usize, stop: usize) {
    let columns = expert.columns();
    let factors = |column: usize, from: usize| &expert.upper[column * columns..][from..columns];
    let tiles = (columns - stop) / TILE;
    for group in &mut *groups {
        for column in start..stop {
            let (source, codes) = (&group.source[column], &group.codes[column]);
            group.errors[column] = std::array::from_fn(|i| source[i] - codes[i] as f32);
        }
        for column in (start..stop).chain(stop + tiles * TILE..columns) {
            let errors = (start..).zip(&group.errors[start..column.min(stop)]);
            group.work[column] = errors.fold(group.work[column], |sum, (fixed, error)| {
                plus(&sum, error, factors(fixed, column)[0])
            });
        }
    }
    for first in (stop..).step_by(TILE).take(tiles) {
        let mut panel = [[0.0; TILE]; BLOCK];
        for (column, own) in (start..stop).zip(&mut panel) {
            own.copy_from_slice(&factors(column, first)[..TILE]);
        }
        for group in &mut *groups {
            add(
                &mut group.work[first..first + TILE],
                &group.errors[start..stop],
                &panel,
            );
        }
    }
}

/// Adds errors of fixed columns, times their factors, to a tile of columns.
#[inline(always)]
fn add(tile: &mut [Column], errors: &[Column], factors: &[[f32; TILE]; BLOCK]) {
    for (number, sums) in tile.as_chunks_mut::<SUMS>().0.iter_mut().enumerate() {
        let mut own = *sums;
        for (error, factors) in errors.iter().zip(factors) {
            for (sum, &factor) in own.iter_mut().zip(&factors.as_chunks::<SUMS>().0[number]) {
                *sum = plus(sum, error, factor);
            }
        }
        *sums = own;
    }
}

/// One column plus another one times a factor.
#[inline(always)]
fn plus(column: &Column, other: &Column, factor: f32) -> Column {
    std::array::from_fn(|i| column[i] + other[i] * factor)
}

impl Group {
    /// Writes the codes of rows and adds up their losses.
    fn finish(&self, pivots: &[f32], codes: &mut [i32], losses: &mut [f64]) {
        let columns = pivots.len();
        for (place, column) in visits(columns).enumerate() {
            let weight = f64::from(pivots[place]).powi(2);
            for (row, codes) in codes.chunks_exact_mut(columns).enumerate() {
                codes[column] = self.codes[place][row];
                let error = f64::from(self.work[place][row] - self.codes[place][row] as f32);
                losses[place] += weight * error * error;
            }
        }
    }
}
