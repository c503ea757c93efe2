use proptest::prelude::*;

use super::*;
use crate::pool;

type Answer = (Vec<f32>, Vec<u8>, Vec<f64>);

fn solve(values: &[f32], weights: &[f32], columns: usize, clusters: usize) -> Result<Answer> {
    let rows = values.len() / columns.max(1);
    let mut answer = (vec![0.0; rows * clusters], vec![0; values.len()], vec![0.0; rows]);
    let problem = Problem {
        values,
        weights,
        columns,
        clusters,
    };
    let solution = Solution {
        centroids: &mut answer.0,
        codes: &mut answer.1,
        errors: &mut answer.2,
    };
    kmeans(problem, solution, &pool::current().unwrap()).map(|()| answer)
}

/// The weighted error of a partition of sorted pairs by its boundaries, with exact means.
fn partition_error(pairs: &[(f64, f64)], cuts: &[usize]) -> f64 {
    let mut total = 0.0;
    for range in cuts.windows(2) {
        let part = &pairs[range[0]..range[1]];
        let weight: f64 = part.iter().map(|p| p.1).sum();
        if weight > 0.0 {
            let mean = part.iter().map(|p| p.0 * p.1).sum::<f64>() / weight;
            total += part.iter().map(|p| p.1 * (p.0 - mean).powi(2)).sum::<f64>();
        }
    }
    total
}

/// The lowest error over all partitions into at most `clusters` intervals, by brute force.
fn naive(pairs: &[(f64, f64)], clusters: usize, cuts: &mut Vec<usize>) -> f64 {
    let from = *cuts.last().unwrap();
    cuts.push(pairs.len());
    let mut least = partition_error(pairs, cuts);
    cuts.pop();
    if clusters > 1 {
        for cut in from + 1..pairs.len() {
            cuts.push(cut);
            least = least.min(naive(pairs, clusters - 1, cuts));
            cuts.pop();
        }
    }
    least
}

/// The error of a solution, from its codes and centroids.
fn answered(values: &[f32], weights: &[f32], centroids: &[f32], codes: &[u8]) -> f64 {
    let error = |(v, c): (&f32, &u8)| (f64::from(*v) - f64::from(centroids[usize::from(*c)])).powi(2);
    let errors = values.iter().zip(codes).map(error);
    match weights {
        [] => errors.sum(),
        weights => errors.zip(weights).map(|(e, &w)| e * f64::from(w)).sum(),
    }
}

proptest! {
    #[test]
    fn no_partition_is_better(
        pairs in prop::collection::vec((-40i8..40, 0u8..5), 1..11), clusters in 1usize..6, weighted: bool,
    ) {
        let values: Vec<f32> = pairs.iter().map(|p| f32::from(p.0) / 8.0).collect();
        let weights: Vec<f32> = if weighted { pairs.iter().map(|p| f32::from(p.1)).collect() } else { vec![] };
        let (centroids, codes, errors) = solve(&values, &weights, values.len(), clusters).unwrap();
        let flat = weights.iter().all(|&w| w == 0.0);
        let used: Vec<f32> = if flat { vec![1.0; values.len()] } else { weights.clone() };
        let mut sorted: Vec<(f64, f64)> =
            values.iter().zip(&used).map(|(&v, &w)| (f64::from(v), f64::from(w))).collect();
        sorted.sort_by(|a, b| a.partial_cmp(b).unwrap());
        let expected = naive(&sorted, clusters, &mut vec![0]);
        prop_assert!((errors[0] - expected).abs() <= 1e-9 * (1.0 + expected), "{} {expected}", errors[0]);
        let found = answered(&values, &used, &centroids, &codes);
        prop_assert!((found - expected).abs() <= 1e-4 * (1.0 + expected), "{found} {expected}");
        prop_assert!(centroids.is_sorted());
        for (&value, &code) in values.iter().zip(&codes) {
            let distance = |c: f32| (f64::from(value) - f64::from(c)).abs();
            let nearest = centroids.iter().map(|&c| distance(c)).fold(f64::INFINITY, f64::min);
            prop_assert_eq!(distance(centroids[usize::from(code)]), nearest);
        }
    }
}

#[test]
fn few_constant_and_outlying_values() {
    let (centroids, codes, errors) = solve(&[2.0, 2.0, 2.0], &[], 3, 4).unwrap();
    assert_eq!((centroids, codes, errors), (vec![2.0; 4], vec![0; 3], vec![0.0]));
    let (centroids, codes, _) = solve(&[3.0, -1.0, 3.0, -0.0, 0.0], &[], 5, 4).unwrap();
    assert_eq!(
        (centroids, codes),
        (vec![-1.0, 0.0, 3.0, 3.0], vec![2, 0, 2, 1, 1])
    );
    let mut row: Vec<f32> = (0..1000).map(|i| (i % 10) as f32).collect();
    row[500] = -1e6;
    let (centroids, _, errors) = solve(&row, &[], 1000, 11).unwrap();
    assert_eq!(centroids[0], -1e6);
    assert_eq!(centroids[1..], (0..10).map(|i| i as f32).collect::<Vec<_>>());
    assert!(errors[0] < 1e-3);
}

#[test]
fn weightless_values_move_no_centroid_and_rows_share_weights() {
    let values = [0.0, 1.0, 10.0, 100.0, 0.0, 1.0, 10.0, 100.0];
    let (centroids, codes, _) = solve(&values, &[1.0, 1.0, 1.0, 0.0], 4, 2).unwrap();
    assert_eq!(centroids, [0.5, 10.0, 0.5, 10.0]);
    assert_eq!(codes, [0, 0, 1, 1, 0, 0, 1, 1]);
    let weights = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0];
    let (centroids, ..) = solve(&values, &weights, 4, 2).unwrap();
    assert_eq!(centroids, [0.0, 10.0, 1.0, 100.0]);
}

#[test]
fn threads_do_not_change_a_bit() {
    let values: Vec<f32> = (0..64 * 300)
        .map(|i: u32| ((i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6).sin())
        .collect();
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let expected = solve(&values, &[], 300, 16).unwrap();
    let mut found = (vec![0.0; 64 * 16], vec![0; values.len()], vec![0.0; 64]);
    let problem = Problem {
        values: &values,
        weights: &[],
        columns: 300,
        clusters: 16,
    };
    let solution = Solution {
        centroids: &mut found.0,
        codes: &mut found.1,
        errors: &mut found.2,
    };
    kmeans(problem, solution, &one).unwrap();
    assert_eq!(found, expected);
}

#[test]
fn invalid_arguments_are_refused() {
    for (values, weights, columns, clusters) in [
        (vec![1.0, f32::NAN], vec![], 2, 2),
        (vec![1.0, f32::INFINITY], vec![], 2, 2),
        (vec![1.0, 2.0], vec![1.0, -1.0], 2, 2),
        (vec![1.0, 2.0], vec![1.0, f32::NAN], 2, 2),
        (vec![1.0, 2.0], vec![1.0], 2, 2),
        (vec![1.0, 2.0], vec![], 2, 0),
        (vec![1.0, 2.0], vec![], 2, 17),
        (vec![1.0, 2.0, 3.0], vec![], 2, 2),
        (vec![], vec![], 0, 2),
    ] {
        assert!(
            solve(&values, &weights, columns, clusters).is_err(),
            "{values:?} {weights:?}"
        );
    }
}
