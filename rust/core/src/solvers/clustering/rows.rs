//! The refinement of a batch of rows that share a Hessian.

use super::problem::{Assignment, Problem, State};
use crate::simd::vectorized;
use crate::solvers::kmeans::MAX_CLUSTERS;

/// The ridge added to the diagonal of a system of centroids, relative to its largest element. It keeps the centroids
/// of clusters without weights, or with weights of zero inputs, in place.
const RIDGE: f64 = 1e-7;

/// Consecutive rows of one expert. All slices of rows start at the first of them.
pub(super) struct Batch<'a> {
    targets: &'a [f32],
    hessian: &'a [f32],
    /// The factor of the Hessian, or empty.
    factor: &'a [f32],
    /// The points of the diagonal assignment, or empty.
    points: &'a [f32],
    columns: usize,
    block: usize,
    clusters: usize,
    steps: usize,
    state: State<'a>,
}

impl<'a> Batch<'a> {
    /// The batch of the rows of `expert` from `row` on, as many as `state` has; sizes must have been checked.
    pub fn new(problem: &Problem<'a>, expert: usize, row: usize, state: State<'a>) -> Batch<'a> {
        let [_, rows, columns] = problem.shape;
        let square = expert * columns * columns..(expert + 1) * columns * columns;
        let first = (expert * rows + row) * columns;
        let own = first..first + state.codes.len();
        let (factor, points) = match problem.assignment {
            Assignment::Coordinate([]) => (&[][..], &[][..]),
            Assignment::Coordinate(factors) => (&factors[square.clone()], &[][..]),
            Assignment::Diagonal(points) => (&[][..], &points[own.clone()]),
        };
        Batch {
            targets: &problem.targets[own],
            hessian: &problem.hessians[square],
            factor,
            points,
            columns,
            block: problem.block,
            clusters: problem.clusters,
            steps: problem.steps,
            state,
        }
    }
}

vectorized! {
    /// Refines a batch; the set does not affect results.
    pub(super) fn refine(batch: Batch) = refine_batch;
}

#[inline(always)]
fn refine_batch(batch: Batch) {
    Search::new(batch).run();
}

struct Search<'a> {
    batch: Batch<'a>,
    rows: usize,
    /// The current codes and centroids; the batch's state holds the best.
    codes: Vec<u8>,
    centroids: Vec<f32>,
    /// The errors q - t and their product with the Hessian, rows x C.
    errors: Vec<f32>,
    gradient: Vec<f32>,
    /// For each row and cluster, the sum of the Hessian's rows over the cluster's columns, rows x K x C.
    sums: Vec<f32>,
}

/// Adds `factor * values` to `sum`, rounding product and sum separately on every instruction set.
#[inline(always)]
fn add(sum: &mut [f32], factor: f32, values: &[f32]) {
    sum.iter_mut().zip(values).for_each(|(s, v)| *s += factor * v);
}

/// The nearest of ascending centroids; the lower of two equally near, the first of equal ones.
#[inline(always)]
fn nearest(value: f32, centroids: &[f32]) -> usize {
    let mut best = 0;
    for (k, pair) in centroids.windows(2).enumerate() {
        // Repeated centroids are skipped: larger ones are compared with the first of the equal ones.
        if pair[1] > centroids[best] && value - centroids[best] > pair[1] - value {
            best = k + 1;
        }
    }
    best
}

impl<'a> Search<'a> {
    #[inline(always)]
    fn new(batch: Batch<'a>) -> Self {
        let rows = batch.state.codes.len() / batch.columns;
        let size = rows * batch.columns;
        Search {
            rows,
            codes: batch.state.codes.to_vec(),
            centroids: batch.state.centroids.to_vec(),
            errors: vec![0.0; size],
            gradient: vec![0.0; size],
            sums: vec![0.0; size * batch.clusters],
            batch,
        }
    }

    #[inline(always)]
    fn run(mut self) {
        let width = self.batch.steps + 1;
        self.measure();
        for row in 0..self.rows {
            self.batch.state.objectives[row * width] = self.objective(row);
        }
        for step in 1..width {
            if !self.batch.points.is_empty() {
                self.assign_points();
            } else if step == 1 && !self.batch.factor.is_empty() {
                self.assign_with_feedback();
            } else {
                self.assign_columns();
            }
            self.measure();
            self.move_centroids();
            self.measure();
            self.keep_best(step);
        }
    }

    /// The range of the codebook of a row's column among all centroids.
    #[inline(always)]
    fn book(&self, row: usize, column: usize) -> std::ops::Range<usize> {
        let blocks = self.batch.columns.div_ceil(self.batch.block);
        let first = (row * blocks + column / self.batch.block) * self.batch.clusters;
        first..first + self.batch.clusters
    }

    /// Computes the errors of the weights and the gradient.
    #[inline(always)]
    fn measure(&mut self) {
        let columns = self.batch.columns;
        self.gradient.fill(0.0);
        for column in 0..columns {
            let hessian = &self.batch.hessian[column * columns..][..columns];
            for row in 0..self.rows {
                let at = row * columns + column;
                let book = self.book(row, column);
                let error = self.centroids[book][usize::from(self.codes[at])] - self.batch.targets[at];
                self.errors[at] = error;
                add(&mut self.gradient[row * columns..][..columns], error, hessian);
            }
        }
    }

    #[inline(always)]
    fn objective(&self, row: usize) -> f64 {
        let range = row * self.batch.columns..(row + 1) * self.batch.columns;
        let pairs = self.errors[range.clone()].iter().zip(&self.gradient[range]);
        pairs.map(|(&d, &g)| f64::from(d) * f64::from(g)).sum()
    }

    #[inline(always)]
    fn assign_points(&mut self) {
        for at in 0..self.codes.len() {
            let book = self.book(at / self.batch.columns, at % self.batch.columns);
            self.codes[at] = nearest(self.batch.points[at], &self.centroids[book]) as u8;
        }
    }

    /// Assigns column by column and compensates each column's error in the targets of the columns after it.
    #[inline(always)]
    fn assign_with_feedback(&mut self) {
        let columns = self.batch.columns;
        // The gradient buffer holds the compensation of the targets here.
        self.gradient.fill(0.0);
        for column in 0..columns {
            let factor = &self.batch.factor[column * columns..][column + 1..columns];
            for row in 0..self.rows {
                let at = row * columns + column;
                let book = self.book(row, column);
                let centroids = &self.centroids[book];
                let code = nearest(self.batch.targets[at] + self.gradient[at], centroids);
                self.codes[at] = code as u8;
                let error = self.batch.targets[at] - centroids[code];
                add(&mut self.gradient[at + 1..(row + 1) * columns], error, factor);
            }
        }
    }

    /// Assigns each weight to the best centroid given all others, column by column.
    #[inline(always)]
    fn assign_columns(&mut self) {
        let columns = self.batch.columns;
        for column in 0..columns {
            let hessian = &self.batch.hessian[column * columns..][..columns];
            let curvature = hessian[column];
            if curvature.is_nan() || curvature <= 0.0 {
                continue;
            }
            for row in 0..self.rows {
                let at = row * columns + column;
                let book = self.book(row, column);
                let centroids = &self.centroids[book];
                let old = centroids[usize::from(self.codes[at])];
                let code = nearest(old - self.gradient[at] / curvature, centroids);
                let moved = centroids[code] - old;
                if moved != 0.0 {
                    self.codes[at] = code as u8;
                    add(&mut self.gradient[row * columns..][..columns], moved, hessian);
                }
            }
        }
    }

    /// Moves the centroids of all column blocks to their best values, block by block.
    #[inline(always)]
    fn move_centroids(&mut self) {
        let (columns, clusters) = (self.batch.columns, self.batch.clusters);
        for first in (0..columns).step_by(self.batch.block) {
            let block = first..(first + self.batch.block).min(columns);
            self.sums.fill(0.0);
            for column in block.clone() {
                let hessian = &self.batch.hessian[column * columns..][..columns];
                for row in 0..self.rows {
                    let cluster = row * clusters + usize::from(self.codes[row * columns + column]);
                    add(&mut self.sums[cluster * columns..][..columns], 1.0, hessian);
                }
            }
            for row in 0..self.rows {
                self.solve(row, block.clone());
            }
        }
    }

    /// Moves the centroids of a row's block to their best values and updates the gradient.
    #[inline(always)]
    fn solve(&mut self, row: usize, block: std::ops::Range<usize>) {
        let (columns, clusters) = (self.batch.columns, self.batch.clusters);
        let mut system = [[0.0; MAX_CLUSTERS]; MAX_CLUSTERS];
        let mut right = [0.0; MAX_CLUSTERS];
        for column in block.clone() {
            let code = usize::from(self.codes[row * columns + column]);
            right[code] -= f64::from(self.gradient[row * columns + column]);
            for (cluster, line) in system.iter_mut().enumerate().take(clusters) {
                line[code] += f64::from(self.sums[(row * clusters + cluster) * columns + column]);
            }
        }
        let Some(moves) = solve_system(&system, &right, clusters) else {
            return;
        };
        let book = self.book(row, block.start);
        for (cluster, &by) in moves.iter().enumerate().take(clusters) {
            // The gradient is updated by the move after rounding to f32, so that it stays that of the centroids.
            let centroid = &mut self.centroids[book.start + cluster];
            let old = *centroid;
            *centroid = (f64::from(old) + by) as f32;
            let sums = &self.sums[(row * clusters + cluster) * columns..][..columns];
            add(
                &mut self.gradient[row * columns..][..columns],
                *centroid - old,
                sums,
            );
        }
        self.sort(row, book, block);
    }

    /// Sorts the centroids of a codebook, and changes codes accordingly.
    #[inline(always)]
    fn sort(&mut self, row: usize, book: std::ops::Range<usize>, block: std::ops::Range<usize>) {
        let centroids = &mut self.centroids[book];
        if centroids.is_sorted() {
            return;
        }
        let mut order: [usize; MAX_CLUSTERS] = std::array::from_fn(|k| k);
        let order = &mut order[..centroids.len()];
        order.sort_by(|&a, &b| centroids[a].total_cmp(&centroids[b]));
        let mut sorted = [0.0; MAX_CLUSTERS];
        let mut renamed = [0; MAX_CLUSTERS];
        for (new, &old) in order.iter().enumerate() {
            sorted[new] = centroids[old];
            renamed[old] = new as u8;
        }
        centroids.copy_from_slice(&sorted[..centroids.len()]);
        for code in &mut self.codes[row * self.batch.columns..][block] {
            *code = renamed[usize::from(*code)];
        }
    }

    /// Copies rows that are better than all previous ones to the state.
    #[inline(always)]
    fn keep_best(&mut self, step: usize) {
        let (columns, width) = (self.batch.columns, self.batch.steps + 1);
        let books = self.centroids.len() / self.rows;
        for row in 0..self.rows {
            let found = self.objective(row);
            let state = &mut self.batch.state;
            let objectives = &mut state.objectives[row * width..][..width];
            let before = objectives[step - 1];
            objectives[step] = before;
            // False for NaN.
            if found < before {
                objectives[step] = found;
                let (codes, centroids) = (row * columns, row * books);
                state.codes[codes..][..columns].copy_from_slice(&self.codes[codes..][..columns]);
                state.centroids[centroids..][..books].copy_from_slice(&self.centroids[centroids..][..books]);
            }
        }
    }
}

/// Solves the ridged K x K system by Cholesky's method; `None` if it has no finite solution.
#[inline(always)]
fn solve_system(
    system: &[[f64; MAX_CLUSTERS]; MAX_CLUSTERS],
    right: &[f64; MAX_CLUSTERS],
    clusters: usize,
) -> Option<[f64; MAX_CLUSTERS]> {
    let largest = (0..clusters).map(|k| system[k][k]).fold(0.0, f64::max);
    let mut lower = [[0.0; MAX_CLUSTERS]; MAX_CLUSTERS];
    let mut solution = [0.0; MAX_CLUSTERS];
    for i in 0..clusters {
        for j in 0..=i {
            let known: f64 = (0..j).map(|k| lower[i][k] * lower[j][k]).sum();
            // The two triangles differ by rounding.
            let value = (system[i][j] + system[j][i]) / 2.0 - known;
            if i == j {
                let pivot = value + RIDGE * largest;
                if pivot.is_nan() || pivot <= 0.0 {
                    return None;
                }
                lower[i][i] = pivot.sqrt();
            } else {
                lower[i][j] = value / lower[j][j];
            }
        }
        let known: f64 = (0..i).map(|k| lower[i][k] * solution[k]).sum();
        solution[i] = (right[i] - known) / lower[i][i];
    }
    for i in (0..clusters).rev() {
        let known: f64 = (i + 1..clusters).map(|k| lower[k][i] * solution[k]).sum();
        solution[i] = (solution[i] - known) / lower[i][i];
    }
    solution[..clusters]
        .iter()
        .all(|s| s.is_finite())
        .then_some(solution)
}
