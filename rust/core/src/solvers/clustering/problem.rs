//! The arguments of a refinement.

use crate::solvers::kmeans::MAX_CLUSTERS;
use crate::{Error, Result};

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
    pub(super) fn blocks(&self) -> usize {
        self.shape[2].div_ceil(self.block)
    }

    /// Checks that sizes fit and codes are below the number of clusters.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] otherwise.
    pub(super) fn check(&self, state: &State) -> Result<()> {
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
