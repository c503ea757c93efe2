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

mod problem;
mod rows;

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::Result;
use crate::simd::Isa;
pub use problem::{Assignment, Problem, State};
use rows::Batch;

/// The rows of a batch, which read a Hessian together.
const BATCH: usize = 8;

/// Refines the codes and centroids of every row.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) if sizes do not match, a code is not below K, or the processor lacks `isa`.
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
