//! Least-squares grids for groups of weights: codes, scales and offsets of least squared error, in one pass over
//! memory.
//!
//! A weight is stored as `scale * code + offset`, with parameters for each row and group of columns. With codes
//! fixed, the best parameters are a regression of the weights on the codes; with parameters fixed, the best codes are
//! the nearest. Both steps alternate, starting from the best of a few grids or from given parameters, and the best
//! parameters of each group are kept. The torch solver in python/moepack/solvers/least_squares.py is the same
//! algorithm on any device, and the reference for errors in the tests.
//!
//! If a matrix is approximated by codes *and* a compensator UV, the caller passes UV: the target is the weights minus
//! UV, and the weights minus the dequantized codes replace UV. An iteration of that alternation thus reads and writes
//! each weight once.
//!
//! Invariants: a group's result depends on its own weights and start only, neither on its neighbours nor on the
//! number of threads or the instruction set (no products are fused, and groups are summed in the order of columns);
//! codes are the nearest ones for the stored parameters; any weights, even NaN, give some codes and no panic.

mod grid;
mod tile;

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::simd::Isa;
use crate::{Error, Result};
pub use grid::{Grid, Storage};
use tile::{LANES, Tile};

/// The weights to quantize.
#[derive(Debug)]
pub struct Problem<'a> {
    /// The weights, R x C.
    pub weights: &'a [f32],
    /// The number of columns C.
    pub columns: usize,
    /// Scales and offsets to start from instead of a search, each R x G.
    pub start: Option<(&'a [f32], &'a [f32])>,
    /// The values of a compensator, R x C, which are replaced by the weights minus the dequantized codes.
    pub compensation: Option<&'a mut [f32]>,
}

/// The outputs of [`fit`].
#[derive(Debug)]
pub struct Solution<'a> {
    /// The codes, R x C.
    pub codes: &'a mut [u8],
    /// The scales as stored, R x G.
    pub scales: &'a mut [f32],
    /// The offsets as stored, R x G; `-2^(bits - 1)` times the scale in symmetric grids.
    pub offsets: &'a mut [f32],
    /// The squared norms of the rows' weights minus the dequantized codes, R.
    pub squares: &'a mut [f64],
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("fitting groups: {what}")))
}

fn check(problem: &Problem, grid: &Grid, solution: &Solution) -> Result<()> {
    let columns = problem.columns;
    if !(1..=8).contains(&grid.bits) || grid.group_size == 0 {
        return invalid(format!(
            "{} bits in groups of {} are not possible",
            grid.bits, grid.group_size
        ));
    }
    if columns == 0 || !problem.weights.len().is_multiple_of(columns) {
        return invalid(format!(
            "{} weights do not form rows of {columns} columns",
            problem.weights.len()
        ));
    }
    let rows = problem.weights.len() / columns;
    let cells = rows * grid.groups(columns);
    let starts = problem
        .start
        .is_none_or(|(s, o)| [s.len(), o.len()] == [cells; 2]);
    let compensation = problem
        .compensation
        .as_ref()
        .is_none_or(|c| c.len() == rows * columns);
    let sizes = [
        solution.codes.len(),
        solution.scales.len(),
        solution.offsets.len(),
        solution.squares.len(),
    ];
    if !starts || !compensation || sizes != [rows * columns, cells, cells, rows] {
        return invalid(format!(
            "the sizes of the arguments do not fit {rows} rows of {columns} columns"
        ));
    }
    Ok(())
}

/// The inputs and outputs of at most [`LANES`] rows.
struct Block<'a> {
    weights: &'a [f32],
    start: Option<(&'a [f32], &'a [f32])>,
    compensation: Option<&'a mut [f32]>,
    solution: Solution<'a>,
}

/// Quantizes every group of every row.
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match or the processor lacks the instruction set.
pub fn fit(problem: Problem, grid: Grid, solution: Solution, isa: Isa, pool: &ThreadPool) -> Result<()> {
    check(&problem, &grid, &solution)?;
    let isa = isa.vectors();
    let blocks = cut(problem.columns, grid.groups(problem.columns), problem, solution);
    let columns = blocks.first().map_or(0, |block| {
        block.solution.codes.len() / block.solution.squares.len()
    });
    pool.install(|| {
        blocks
            .into_par_iter()
            .for_each_init(Tile::default, |tile, block| {
                fit_block(isa, tile, block, columns, &grid)
            });
    });
    Ok(())
}

/// Divides the inputs and outputs into blocks of rows.
fn cut<'a>(columns: usize, groups: usize, problem: Problem<'a>, solution: Solution<'a>) -> Vec<Block<'a>> {
    let (wide, narrow) = (LANES * columns, LANES * groups);
    let mut compensation = problem.compensation.map(|all| all.chunks_mut(wide));
    let blocks = problem
        .weights
        .chunks(wide)
        .zip(solution.codes.chunks_mut(wide))
        .zip(
            solution
                .scales
                .chunks_mut(narrow)
                .zip(solution.offsets.chunks_mut(narrow)),
        )
        .zip(solution.squares.chunks_mut(LANES));
    blocks
        .enumerate()
        .map(|(i, (((weights, codes), (scales, offsets)), squares))| {
            let own = i * narrow..i * narrow + scales.len();
            Block {
                weights,
                start: problem.start.map(|(s, o)| (&s[own.clone()], &o[own])),
                compensation: compensation.as_mut().and_then(Iterator::next),
                solution: Solution {
                    codes,
                    scales,
                    offsets,
                    squares,
                },
            }
        })
        .collect()
}

/// Quantizes the groups of a block sequentially, with one row per lane.
fn fit_block(isa: Isa, tile: &mut Tile, mut block: Block, columns: usize, grid: &Grid) {
    let groups = grid.groups(columns);
    let rows = block.solution.squares.len();
    block.solution.squares.fill(0.0);
    for group in 0..groups {
        let span = group * grid.group_size..columns.min((group + 1) * grid.group_size);
        tile.load(
            block.weights,
            block.compensation.as_deref(),
            columns,
            span.clone(),
        );
        let start = block.start.map(|(scales, offsets)| {
            let lane =
                |all: &[f32]| std::array::from_fn(|l| if l < rows { all[l * groups + group] } else { 0.0 });
            tile::Parameters {
                scales: lane(scales),
                offsets: lane(offsets),
            }
        });
        let found = tile::solve(isa, tile, grid, start);
        for row in 0..rows {
            block.solution.scales[row * groups + group] = found.scales[row];
            block.solution.offsets[row * groups + group] = found.offsets[row];
            let at = row * columns + span.start..row * columns + span.end;
            let values = block.compensation.as_deref_mut().map(|all| &mut all[at.clone()]);
            let (weights, codes) = (&block.weights[at.clone()], &mut block.solution.codes[at]);
            block.solution.squares[row] += tile.store(row, weights, codes, values);
        }
    }
}

#[cfg(test)]
mod tests;
