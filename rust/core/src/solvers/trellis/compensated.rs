//! GPTQ along each path (per-survivor processing: Raheli, Polydoros and Tzou, 1995).
//!
//! A column's error is spread over the columns that are still free (python/moepack/solvers/gptq.py), so each path has
//! its own weights there. Columns are visited lane by lane. After [`BLOCK`] of them, or at the end of a lane, the
//! cheapest path is fixed and its errors are spread over all later columns.
//!
//! 16 rows are searched in parallel, one per vector element: a state's paths come from one of two states, so the
//! weights of its path are selected from two vectors, row by row, and nothing moves between elements.

#![allow(clippy::needless_range_loop)] // Indexing elements of vectors is clearest here.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{BLOCK_ROWS as ROWS, FROM, LANES, STATES, cheapest, invalid};
use crate::Result;
use crate::simd::{Isa, vectorized};

/// The maximum number of columns after which a path is fixed. The work on free columns grows with it.
const BLOCK: usize = 32;
/// Compensated weights in fine units are clamped to this value, beyond which a search is lost anyway.
const MOST: f32 = (1 << 25) as f32;
/// The number of groups of 16 rows that read the factors together.
const GROUPS: usize = 4;

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
    /// The lengths of a list, 2 L + 3.
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
    let lists = check(&matrices)?;
    let [experts, rows, columns] = matrices.shape;
    let (mut codes, unit) = (
        vec![0; experts * rows * columns],
        (GROUPS * ROWS * columns).max(1),
    );
    let by_expert = codes.par_chunks_mut((rows * columns).max(1)).enumerate();
    let mut losses: Vec<f64> = pool.install(|| {
        let losses = by_expert.flat_map_iter(|(expert, codes)| {
            let expert = Expert::new(&matrices, &lists, expert);
            let units = codes.par_chunks_mut(unit).enumerate();
            let parts: Vec<_> = units
                .map(|(number, codes)| expert.solve(isa, number * GROUPS * ROWS, codes))
                .collect();
            (0..columns).map(move |column| parts.iter().map(|part| part[column]).sum())
        });
        losses.collect()
    });
    losses.resize(experts * columns, 0.0);
    Ok(Solved { codes, losses })
}

/// Checks the arguments; returns the lists of lengths for [`Expert::edges`].
fn check(matrices: &Matrices) -> Result<Vec<[f32; 2]>> {
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
    if indices < 5 || indices % 2 == 0 || lengths.is_empty() || !lengths.len().is_multiple_of(indices) {
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
        true => Ok(lengths.chunks_exact(indices).flat_map(pairs).collect()),
        false => invalid("NaN or infinite weights"),
    }
}

/// The bits of each index, and those of the next index of its parity towards zero.
fn pairs(list: &[f32]) -> impl Iterator<Item = [f32; 2]> {
    let middle = list.len() / 2;
    (0..list.len()).map(move |place| {
        [
            list[place],
            list[if place > middle { place - 2 } else { place + 2 }],
        ]
    })
}

/// The shared data of an expert's rows.
struct Expert<'a> {
    /// The number of fine units in 1.
    fine: f32,
    /// The cost of a bit in squared fine units.
    price: f32,
    weights: &'a [f32],
    upper: &'a [f32],
    pivots: &'a [f32],
    /// By row.
    runs: &'a [i64],
    /// By run and index, see [`pairs`].
    lists: &'a [[f32; 2]],
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
    /// The start of each row's list.
    lists: [usize; ROWS],
}

/// The record of a column for each state and row: the code that leads there, and whether its index is odd.
#[derive(Clone, Copy)]
struct Step {
    codes: [[i32; ROWS]; STATES],
    odd: [[u32; ROWS]; STATES],
}

impl<'a> Expert<'a> {
    fn new(matrices: &Matrices<'a>, lists: &'a [[f32; 2]], number: usize) -> Expert<'a> {
        let [_, rows, columns] = matrices.shape;
        let part = |all: &'a [f32], size: usize| &all[number * size..][..size];
        Expert {
            fine: (4.0 / matrices.step) as f32,
            price: 16.0 * matrices.prices[number],
            weights: part(matrices.weights, rows * columns),
            upper: part(matrices.upper, columns * columns),
            pivots: part(matrices.pivots, columns),
            runs: &matrices.runs[number * rows..][..rows],
            lists,
            indices: matrices.indices,
        }
    }

    fn columns(&self) -> usize {
        self.pivots.len()
    }

    /// Solves rows from `first` on; returns the losses of columns.
    fn solve(&self, isa: Isa, first: usize, codes: &mut [i32]) -> Vec<f64> {
        let columns = self.columns();
        let rows: Vec<usize> = (first..first + codes.len() / columns).collect();
        let mut groups: Vec<Group> = rows.chunks(ROWS).map(|rows| self.group(rows)).collect();
        let mut start = 0;
        for lane in 0..LANES {
            let end = start + (columns + LANES - 1 - lane) / LANES;
            groups.iter_mut().for_each(|group| group.states = [0; ROWS]);
            while start < end {
                let stop = end.min(start + BLOCK);
                groups
                    .iter_mut()
                    .for_each(|group| block(isa, self, group, start, stop));
                start = stop;
            }
        }
        let mut losses = vec![0.0; columns];
        for (group, codes) in groups.iter().zip(codes.chunks_mut(ROWS * columns)) {
            group.finish(self.pivots, codes, &mut losses);
        }
        losses
    }

    fn group(&self, rows: &[usize]) -> Group {
        let columns = self.columns();
        let (mut source, mut lists) = (vec![[0.0; ROWS]; columns], [0; ROWS]);
        for (i, &row) in rows.iter().enumerate() {
            lists[i] = self.runs[row] as usize * self.indices;
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

    /// The better code of a state with an index of a parity, out of the nearest and the next one towards zero, and
    /// the costs.
    #[inline(always)]
    fn edges(
        &self,
        group: &Group,
        weight: f32,
        units: &Column,
        from: usize,
        parity: i32,
    ) -> ([i32; ROWS], Column) {
        let (sign, middle) = (
            if from.is_multiple_of(2) { 1 } else { -1 },
            self.indices as i32 / 2,
        );
        let (mut codes, mut costs) = ([0; ROWS], [0.0; ROWS]);
        let (mut own, mut places, mut bits) = ([0.0; ROWS], [0; ROWS], [[0.0; 2]; ROWS]);
        for i in 0..ROWS {
            own[i] = cut_off(sign as f32 * units[i]);
            codes[i] = 2 * whole((own[i] - (1 + 4 * parity) as f32) * 0.125) + parity;
            let last = if codes[i] > middle { middle } else { codes[i] };
            places[i] = if last < -middle { 0 } else { last + middle };
        }
        for (bits, (list, &place)) in bits.iter_mut().zip(group.lists.iter().zip(&places)) {
            *bits = self.lists[list + place as usize];
        }
        for i in 0..ROWS {
            let (index, [bits, inner_bits]) = (codes[i], bits[i]);
            let (code, inner) = (4 * index + 1, 4 * index + if index > 0 { -7 } else { 9 });
            let (error, inner_error) = (own[i] - code as f32, own[i] - inner as f32);
            let cost = error * error * weight + self.price * bits;
            let inner_cost = inner_error * inner_error * weight + self.price * inner_bits;
            codes[i] = sign * if inner_cost < cost { inner } else { code };
            costs[i] = if inner_cost < cost { inner_cost } else { cost };
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
    /// Fixes some columns of a lane and spreads their errors.
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
        let mut errors = [[0.0; ROWS]; STATES];
        for (errors, codes) in errors.iter_mut().zip(&step.codes) {
            for i in 0..ROWS {
                errors[i] = group.source[column][i] - codes[i] as f32;
            }
        }
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
    spread(expert, group, start, stop);
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
    for parity in 0..2 {
        for from in 0..STATES {
            let (found, edges) = expert.edges(group, weight, &free[from], from, parity as i32);
            codes[parity][from] = found;
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

/// Spreads the errors of a block's fixed codes over all later columns, in the order of visits.
#[inline(always)]
fn spread(expert: &Expert, group: &mut Group, start: usize, stop: usize) {
    let columns = expert.columns();
    let factors = |column: usize, from: usize| &expert.upper[column * columns..][from..columns];
    for column in start..stop {
        let error = &mut group.errors[column];
        for i in 0..ROWS {
            error[i] = group.source[column][i] - group.codes[column][i] as f32;
        }
        for (work, &factor) in group.work[column + 1..stop]
            .iter_mut()
            .zip(factors(column, column + 1))
        {
            for i in 0..ROWS {
                work[i] += error[i] * factor;
            }
        }
    }
    let (mut column, later) = (start, &mut group.work[stop..]);
    while column + 4 <= stop {
        let errors: &[Column; 4] = group.errors[column..]
            .first_chunk()
            .expect("at least four columns are left");
        let factors = [0, 1, 2, 3].map(|i| factors(column + i, stop));
        for (j, work) in later.iter_mut().enumerate() {
            for i in 0..ROWS {
                let sum = work[i] + errors[0][i] * factors[0][j] + errors[1][i] * factors[1][j];
                work[i] = sum + errors[2][i] * factors[2][j] + errors[3][i] * factors[3][j];
            }
        }
        column += 4;
    }
    for column in column..stop {
        for (work, &factor) in later.iter_mut().zip(factors(column, stop)) {
            for i in 0..ROWS {
                work[i] += group.errors[column][i] * factor;
            }
        }
    }
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
