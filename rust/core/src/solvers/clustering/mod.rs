//! Refinement of each row's codes and centroids on the output error of a matrix (CodeQuant, section 3.2).
//!
//! With t the target weights of a row, q its clustered ones and H the second moments of its inputs, the output error
//! is `(q - t) H (q - t)^T`. Two steps alternate; except for rounding, neither can raise the error:
//!
//! * *assignments*, with fixed centroids. Either coordinate descent, which assigns each column's weight to the best
//!   centroid given all others ([`Assignment::Coordinate`]); or by only the diagonal of H, each weight to the
//!   centroid nearest to a given point ([`Assignment::Diagonal`], the paper's equation 8, which may raise the error).
//! * *centroids*, with fixed assignments: the error is quadratic in the K centroids of a column block, so their best
//!   values solve a K x K system. The systems of a row's blocks are solved sequentially.
//!
//! If factors of H are given, the first assignment compensates each column's rounding error in the columns after it,
//! like GPTQ. This is a far better start for coordinate descent than the nearest centroids.
//!
//! Rows are refined in batches, so that a row of H is read once for all of them. A step takes some 3 C^2
//! multiply-adds per row.
//!
//! Invariants: every row ends with the best codes and centroids found, including the given ones, so its objective
//! never rises; centroids ascend; a cluster without weights keeps its centroid; results do not depend on the number
//! of threads. Hessians must be symmetric and finite, which is not checked; others give poor results, but no NaN
//! centroids.

mod rows;

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::simd::Isa;
use crate::solvers::kmeans::MAX_CLUSTERS;
use crate::{Error, Result};
use rows::Batch;

/// The rows of a batch, which read a Hessian together.
const BATCH: usize = 8;

/// The assignment of weights to centroids.
#[derive(Debug, Clone, Copy)]
pub enum Assignment<'a> {
    /// Coordinate descent; the first step uses E x C x C unit upper triangular factors of the Hessians unless they
    /// are empty.
    Coordinate(&'a [f32]),
    /// The centroid nearest to a point; E x R x C points.
    Diagonal(&'a [f32]),
}

/// The targets of the clustered weights, and the settings of the search.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// The target weights, E x R x C.
    pub targets: &'a [f32],
    /// The second moments of the inputs, E x C x C.
    pub hessians: &'a [f32],
    /// The assignment of weights to centroids.
    pub assignment: Assignment<'a>,
    /// The experts E, rows R and columns C.
    pub shape: [usize; 3],
    /// The number of columns that share a codebook; the last block of a row may be shorter.
    pub block: usize,
    /// The number K of centroids of a codebook, 1 to [`MAX_CLUSTERS`].
    pub clusters: usize,
    /// The number of iterations, each an assignment and an update of the centroids.
    pub steps: usize,
}

/// The codes and centroids from which the search starts, replaced by the best found.
#[derive(Debug)]
pub struct State<'a> {
    /// The codes, E x R x C, below K.
    pub codes: &'a mut [u8],
    /// The centroids, E x R x B x K, ascending in each codebook.
    pub centroids: &'a mut [f32],
    /// The lowest objective before the first step and after each step, E x R x (steps + 1).
    pub objectives: &'a mut [f64],
}

impl Problem<'_> {
    /// The number of column blocks.
    fn blocks(&self) -> usize {
        self.shape[2].div_ceil(self.block)
    }

    fn check(&self, state: &State) -> Result<()> {
        let [experts, rows, columns] = self.shape;
        if self.block == 0 || !(1..=MAX_CLUSTERS).contains(&self.clusters) {
            let message = format!(
                "blocks of {} columns with {} clusters are not possible",
                self.block, self.clusters
            );
            return Err(Error::InvalidArgument(message));
        }
        let product = |sizes: &[usize]| sizes.iter().try_fold(1usize, |a, &b| a.checked_mul(b));
        let (matrix, square) = ([experts, rows, columns], [experts, columns, columns]);
        let assignment = match self.assignment {
            Assignment::Coordinate([]) => true,
            Assignment::Coordinate(factors) => Some(factors.len()) == product(&square),
            Assignment::Diagonal(points) => Some(points.len()) == product(&matrix),
        };
        let books = [experts, rows, self.blocks(), self.clusters];
        let fits = Some(self.targets.len()) == product(&matrix)
            && Some(self.hessians.len()) == product(&square)
            && Some(state.codes.len()) == product(&matrix)
            && Some(state.centroids.len()) == product(&books)
            && Some(state.objectives.len()) == product(&[experts, rows, self.steps + 1]);
        if !fits || !assignment {
            let message = format!("sizes do not fit {:?} in blocks of {}", self.shape, self.block);
            return Err(Error::InvalidArgument(message));
        }
        if state.codes.iter().any(|&code| usize::from(code) >= self.clusters) {
            let message = format!("a code is not below {}", self.clusters);
            return Err(Error::InvalidArgument(message));
        }
        Ok(())
    }
}

/// Refines the codes and centroids of every row.
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match, a code is not below K, or the processor lacks `isa`.
pub fn refine(problem: Problem, state: State, isa: Isa, pool: &ThreadPool) -> Result<()> {
    problem.check(&state)?;
    let isa = isa.vectors();
    let [_, rows, columns] = problem.shape;
    if rows == 0 || columns == 0 {
        state.objectives.fill(0.0);
        return Ok(());
    }
    let books = problem.blocks() * problem.clusters;
    let experts = state
        .codes
        .par_chunks_exact_mut(rows * columns)
        .zip(state.centroids.par_chunks_exact_mut(rows * books))
        .zip(state.objectives.par_chunks_exact_mut(rows * (problem.steps + 1)));
    let work = experts
        .enumerate()
        .flat_map(|(expert, ((codes, centroids), objectives))| {
            codes
                .par_chunks_mut(BATCH * columns)
                .zip(centroids.par_chunks_mut(BATCH * books))
                .zip(objectives.par_chunks_mut(BATCH * (problem.steps + 1)))
                .enumerate()
                .map(move |(batch, ((codes, centroids), objectives))| {
                    let state = State {
                        codes,
                        centroids,
                        objectives,
                    };
                    Batch::new(&problem, expert, batch * BATCH, state)
                })
        });
    pool.install(|| work.for_each(|batch| rows::refine(isa, batch)));
    Ok(())
}

#[cfg(test)]
mod tests;
