use proptest::prelude::*;

use super::*;
use crate::pool;

/// A small problem: E = 2 experts with Hessians of random inputs, targets, and a start from quantiles.
struct Case {
    shape: [usize; 3],
    block: usize,
    clusters: usize,
    targets: Vec<f32>,
    hessians: Vec<f32>,
    codes: Vec<u8>,
    centroids: Vec<f32>,
}

fn random(seed: &mut u64) -> f32 {
    *seed = seed
        .wrapping_mul(6364136223846793005)
        .wrapping_add(1442695040888963407);
    (*seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

impl Case {
    fn new(rows: usize, columns: usize, block: usize, clusters: usize, mut seed: u64) -> Case {
        let seed = &mut seed;
        let mut hessians = vec![0.0; 2 * columns * columns];
        for expert in hessians.chunks_exact_mut(columns * columns) {
            for _ in 0..2 * columns {
                let shared = random(seed);
                let x: Vec<f32> = (0..columns).map(|_| random(seed) + shared).collect();
                for (i, line) in expert.chunks_exact_mut(columns).enumerate() {
                    add_to(line, x[i], &x);
                }
            }
        }
        let blocks = columns.div_ceil(block);
        let step = 2.0 / clusters as f32;
        let book: Vec<f32> = (0..clusters).map(|k| step * (k as f32 + 0.5) - 1.0).collect();
        let targets: Vec<f32> = (0..2 * rows * columns).map(|_| random(seed)).collect();
        let codes = targets
            .iter()
            .map(|t| ((t + 1.0) / step).clamp(0.0, clusters as f32 - 1.0) as u8);
        Case {
            shape: [2, rows, columns],
            block,
            clusters,
            codes: codes.collect(),
            centroids: book.repeat(2 * rows * blocks),
            targets,
            hessians,
        }
    }

    fn refine(&mut self, assignment: Assignment, steps: usize, isa: Isa) -> Result<Vec<f64>> {
        let problem = Problem {
            targets: &self.targets,
            hessians: &self.hessians,
            assignment,
            shape: self.shape,
            block: self.block,
            clusters: self.clusters,
            steps,
        };
        let mut objectives = vec![0.0; 2 * self.shape[1] * (steps + 1)];
        let state = State {
            codes: &mut self.codes,
            centroids: &mut self.centroids,
            objectives: &mut objectives,
        };
        refine(problem, state, isa, &pool::current().unwrap()).map(|()| objectives)
    }

    /// The objective of a row by its definition.
    fn naive(&self, at: usize) -> f64 {
        let [_, rows, columns] = self.shape;
        let blocks = columns.div_ceil(self.block);
        let errors: Vec<f64> = (0..columns)
            .map(|c| {
                let book = &self.centroids[(at * blocks + c / self.block) * self.clusters..];
                let code = usize::from(self.codes[at * columns + c]);
                f64::from(book[code]) - f64::from(self.targets[at * columns + c])
            })
            .collect();
        let hessian = &self.hessians[at / rows * columns * columns..];
        let product = |i: usize| -> f64 {
            let line = &hessian[i * columns..][..columns];
            line.iter().zip(&errors).map(|(&h, d)| f64::from(h) * d).sum()
        };
        (0..columns).map(|i| errors[i] * product(i)).sum()
    }
}

fn add_to(line: &mut [f32], factor: f32, x: &[f32]) {
    line.iter_mut().zip(x).for_each(|(h, x)| *h += factor * x);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn objectives_fall_and_match_the_answer(
        rows in 1usize..11, columns in 1usize..40, block in 1usize..50, clusters in 1usize..17, seed: u64,
        diagonal: bool,
    ) {
        let mut case = Case::new(rows, columns, block, clusters, seed);
        let starts: Vec<f64> = (0..2 * rows).map(|at| case.naive(at)).collect();
        let points = case.targets.clone();
        let assignment = if diagonal { Assignment::Diagonal(&points) } else { Assignment::Coordinate(&[]) };
        let objectives = case.refine(assignment, 3, Isa::SCALAR).unwrap();
        for (at, found) in objectives.chunks_exact(4).enumerate() {
            prop_assert!((found[0] - starts[at]).abs() <= 1e-4 * starts[at] + 1e-5);
            prop_assert!(found.is_sorted_by(|a, b| a >= b));
            let end = case.naive(at);
            prop_assert!((found[3] - end).abs() <= 1e-4 * starts[at] + 1e-5, "{} {}", found[3], end);
        }
        prop_assert!(case.centroids.chunks_exact(clusters).all(|book| book.is_sorted()));
    }

    #[test]
    fn instruction_sets_agree(rows in 1usize..11, columns in 1usize..40, seed: u64) {
        let mut expected = Case::new(rows, columns, 16, 8, seed);
        expected.refine(Assignment::Coordinate(&[]), 3, Isa::SCALAR).unwrap();
        for isa in Isa::all_available() {
            let mut case = Case::new(rows, columns, 16, 8, seed);
            case.refine(Assignment::Coordinate(&[]), 3, isa).unwrap();
            prop_assert!(case.codes == expected.codes && case.centroids == expected.centroids);
        }
    }
}

#[test]
fn no_move_of_one_weight_or_centroid_helps_at_the_end() {
    let mut case = Case::new(3, 24, 10, 4, 5);
    case.refine(Assignment::Coordinate(&[]), 60, Isa::SCALAR).unwrap();
    for at in 0..6 {
        let best = case.naive(at);
        for column in 0..24 {
            let kept = case.codes[at * 24 + column];
            for code in 0..4 {
                case.codes[at * 24 + column] = code;
                assert!(case.naive(at) >= best - 1e-4);
            }
            case.codes[at * 24 + column] = kept;
        }
        for centroid in at * 12..(at + 1) * 12 {
            let kept = case.centroids[centroid];
            for by in [-0.01, 0.01] {
                case.centroids[centroid] = kept + by;
                assert!(case.naive(at) >= best - 1e-4);
            }
            case.centroids[centroid] = kept;
        }
    }
}

#[test]
fn the_factors_of_a_diagonal_hessian_pass_nothing_on() {
    let mut case = Case::new(2, 5, 5, 4, 1);
    case.hessians.fill(0.0);
    let mut factors = vec![0.0; 50];
    for at in [0, 6, 12, 18, 24, 25, 31, 37, 43, 49] {
        case.hessians[at] = 2.0;
        factors[at] = 1.0;
    }
    let (codes, start) = (case.codes.clone(), case.naive(0));
    let found = case
        .refine(Assignment::Coordinate(&factors), 1, Isa::SCALAR)
        .unwrap();
    assert_eq!(case.codes, codes);
    assert!(found[1] <= start && found[0] > 0.0);
}

#[test]
fn empty_clusters_dead_columns_and_zero_hessians_keep_their_centroids() {
    let mut case = Case::new(2, 6, 6, 4, 2);
    case.codes.fill(1);
    case.hessians.fill(0.0);
    let before = case.centroids.clone();
    case.refine(Assignment::Coordinate(&[]), 2, Isa::SCALAR).unwrap();
    assert_eq!(
        (case.codes.iter().all(|&c| c == 1), &case.centroids),
        (true, &before)
    );
    for i in 0..6 {
        case.hessians[7 * i] = 1.0;
    }
    case.targets.fill(-0.7);
    case.refine(Assignment::Coordinate(&[]), 2, Isa::SCALAR).unwrap();
    assert!(case.centroids[1..4] == before[1..4] && (case.centroids[0] + 0.7).abs() < 1e-6);
    case.hessians.fill(f32::NAN);
    let before = case.centroids.clone();
    case.refine(Assignment::Coordinate(&[]), 2, Isa::SCALAR).unwrap();
    assert_eq!(case.centroids, before);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut case = Case::new(2, 6, 6, 4, 3);
    case.codes[3] = 4;
    assert!(case.refine(Assignment::Coordinate(&[]), 1, Isa::SCALAR).is_err());
    case.codes[3] = 3;
    assert!(
        case.refine(Assignment::Coordinate(&[0.0]), 1, Isa::SCALAR)
            .is_err()
    );
    assert!(case.refine(Assignment::Diagonal(&[0.0]), 1, Isa::SCALAR).is_err());
    case.hessians.pop();
    assert!(case.refine(Assignment::Coordinate(&[]), 1, Isa::SCALAR).is_err());
    case.block = 0;
    assert!(case.refine(Assignment::Coordinate(&[]), 1, Isa::SCALAR).is_err());
}
