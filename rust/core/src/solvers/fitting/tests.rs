//! Comparisons with a naive solver in f64, and between instruction sets.

use proptest::prelude::*;

use super::*;
use crate::pool;

struct Answer {
    codes: Vec<u8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
    squares: Vec<f64>,
    residual: Vec<f32>,
}

fn grid(bits: u32, group_size: usize, symmetric: bool) -> Grid {
    Grid {
        bits,
        group_size,
        symmetric,
        storage: Storage::F16,
        iterations: 8,
    }
}

fn run(
    weights: &[f32],
    columns: usize,
    grid: Grid,
    start: Option<(&[f32], &[f32])>,
    compensation: Vec<f32>,
    isa: Isa,
) -> Answer {
    let rows = weights.len() / columns;
    let cells = rows * grid.groups(columns);
    let mut out = Answer {
        codes: vec![255; weights.len()],
        scales: vec![f32::NAN; cells],
        offsets: vec![f32::NAN; cells],
        squares: vec![f64::NAN; rows],
        residual: compensation,
    };
    let problem = Problem {
        weights,
        columns,
        start,
        compensation: Some(&mut out.residual),
    };
    let solution = Solution {
        codes: &mut out.codes,
        scales: &mut out.scales,
        offsets: &mut out.offsets,
        squares: &mut out.squares,
    };
    fit(problem, grid, solution, isa, &pool::current().unwrap()).unwrap();
    out
}

fn plain(weights: &[f32], columns: usize, grid: Grid) -> Answer {
    run(
        weights,
        columns,
        grid,
        None,
        vec![0.0; weights.len()],
        Isa::SCALAR,
    )
}

/// Values distributed like weights: sums of uniform numbers.
fn weights(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count)
        .map(|_| (next() + next() + next() + next()) * 0.03)
        .collect()
}

fn value(answer: &Answer, grid: Grid, columns: usize, at: usize) -> f32 {
    let cell = at / columns * grid.groups(columns) + at % columns / grid.group_size;
    let (code, scale) = (f32::from(answer.codes[at]), answer.scales[cell]);
    if grid.symmetric {
        (code - (1 << (grid.bits - 1)) as f32) * scale
    } else {
        code * scale + answer.offsets[cell]
    }
}

/// The error of a solver in f64 that alternates regressions and rounding, from the range of the group.
fn naive(x: &[f32], top: f64) -> f64 {
    let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let low = x.iter().copied().fold(f64::INFINITY, f64::min);
    let high = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut scale, mut offset, mut least) = ((high - low) / top, low, f64::INFINITY);
    for _ in 0..10 {
        let codes: Vec<f64> = x
            .iter()
            .map(|x| ((x - offset) / scale).round().clamp(0.0, top))
            .collect();
        let error = x
            .iter()
            .zip(&codes)
            .map(|(x, c)| (x - c * scale - offset).powi(2))
            .sum();
        least = f64::min(least, error);
        let n = x.len() as f64;
        let (cm, xm) = (codes.iter().sum::<f64>() / n, x.iter().sum::<f64>() / n);
        let spread: f64 = codes.iter().map(|c| (c - cm).powi(2)).sum();
        if spread == 0.0 {
            break;
        }
        scale = x
            .iter()
            .zip(&codes)
            .map(|(x, c)| (c - cm) * (x - xm))
            .sum::<f64>()
            / spread;
        offset = xm - scale * cm;
    }
    least
}

#[test]
fn errors_are_at_most_those_of_the_naive_solver() {
    let (columns, x) = (128, weights(20 * 128));
    for bits in [2, 3, 4] {
        let found = plain(&x, columns, grid(bits, 64, false));
        let naive: f64 = x
            .chunks(64)
            .map(|group| naive(group, f64::from((1 << bits) - 1)))
            .sum();
        assert!(found.squares.iter().sum::<f64>() < 1.001 * naive, "{bits}");
    }
}

#[test]
fn residuals_and_squares_match_the_stored_values() {
    for (symmetric, columns, group_size) in [(false, 70, 32), (true, 70, 32), (false, 5, 64), (true, 64, 64)]
    {
        let (grid, x) = (grid(3, group_size, symmetric), weights(19 * columns));
        let compensation: Vec<f32> = weights(x.len() + 7)[7..].iter().map(|x| x * 0.3).collect();
        let found = run(&x, columns, grid, None, compensation.clone(), Isa::SCALAR);
        for (row, square) in found.squares.iter().enumerate() {
            let mut sum = 0.0;
            for (at, &x) in x.iter().enumerate().skip(row * columns).take(columns) {
                assert!(found.codes[at] < 8);
                assert_eq!(found.residual[at], x - value(&found, grid, columns, at));
                sum += f64::from(found.residual[at]).powi(2);
            }
            assert!((square - sum).abs() <= 1e-5 * sum);
        }
        // The weights minus their compensation are quantized.
        let target: Vec<f32> = x.iter().zip(&compensation).map(|(x, c)| x - c).collect();
        let alone = plain(&target, columns, grid);
        assert_eq!((found.codes, found.scales), (alone.codes, alone.scales));
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let x = weights(37 * 150);
    for storage in [Storage::F16, Storage::Bf16] {
        for (bits, symmetric) in [(1, false), (2, true), (3, false), (8, true)] {
            let grid = Grid {
                storage,
                ..grid(bits, 64, symmetric)
            };
            let first = plain(&x, 150, grid);
            for isa in Isa::all_available() {
                let found = run(&x, 150, grid, None, vec![0.0; x.len()], isa);
                assert!(found.codes == first.codes && found.scales == first.scales);
                assert!(found.offsets == first.offsets && found.squares == first.squares);
            }
        }
    }
}

#[test]
fn a_start_is_never_lost() {
    let (columns, grid) = (96, grid(3, 32, false));
    let x = weights(33 * columns);
    let first = plain(&x, columns, grid);
    let moved: Vec<f32> = x
        .iter()
        .zip(weights(x.len() + 3)[3..].iter())
        .map(|(x, y)| x + 0.05 * y)
        .collect();
    let start = Some((&first.scales[..], &first.offsets[..]));
    let still = Grid {
        iterations: 0,
        ..grid
    };
    let kept = run(&moved, columns, still, start, vec![0.0; x.len()], Isa::SCALAR);
    assert_eq!((&kept.scales, &kept.offsets), (&first.scales, &first.offsets));
    let better = run(
        &moved,
        columns,
        Grid {
            iterations: 2,
            ..grid
        },
        start,
        vec![0.0; x.len()],
        Isa::SCALAR,
    );
    let sum = |answer: &Answer| answer.squares.iter().sum::<f64>();
    assert!(sum(&better) < sum(&kept));
}

#[test]
fn degenerate_groups() {
    let big = 60_000.0;
    let rows = [
        vec![0.0; 8],
        vec![-0.25; 8],
        vec![0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        [big, -big].repeat(4),
    ];
    for row in rows {
        for symmetric in [false, true] {
            let found = plain(&row, 8, grid(3, 8, symmetric));
            let size: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!(found.squares[0] <= 0.02 * size, "{row:?}");
            assert!(found.scales[0].is_finite() && found.offsets[0].is_finite());
        }
    }
    let odd = plain(&[f32::NAN, 1.0, f32::INFINITY, -1.0], 4, grid(3, 4, false));
    assert!(odd.codes.iter().all(|&code| code < 8));
}

#[test]
fn sizes_are_checked() {
    let pool = pool::current().unwrap();
    let (weights, mut codes, mut scales, mut squares) = ([0.0; 8], [0; 8], [0.0; 2], [0.0; 2]);
    for (columns, bits, group, cells, rows) in [
        (3, 3, 4, 2, 2),
        (0, 3, 4, 2, 2),
        (4, 0, 4, 2, 2),
        (4, 9, 4, 2, 2),
        (4, 3, 0, 2, 2),
        (4, 3, 4, 1, 2),
        (4, 3, 4, 2, 1),
    ] {
        let problem = Problem {
            weights: &weights,
            columns,
            start: None,
            compensation: None,
        };
        let mut offsets = [0.0; 2];
        let solution = Solution {
            codes: &mut codes,
            scales: &mut scales[..cells],
            offsets: &mut offsets,
            squares: &mut squares[..rows],
        };
        assert!(fit(problem, grid(bits, group, false), solution, Isa::SCALAR, &pool).is_err());
    }
}

proptest! {
    #[test]
    fn parameters_are_rounded_as_halves_are(bits in any::<u32>()) {
        let x = f32::from_bits(bits);
        prop_assume!(!x.is_nan());
        let half = half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32();
        prop_assert_eq!(tile::stored(x, Storage::F16), half);
        let most = half::bf16::MAX.to_f32();
        prop_assert_eq!(tile::stored(x, Storage::Bf16), half::bf16::from_f32(x.clamp(-most, most)).to_f32());
    }

    #[test]
    fn small_numbers_are_rounded_as_halves_are(x in -1e-4f32..1e-4) {
        prop_assert_eq!(tile::stored(x, Storage::F16), half::f16::from_f32(x).to_f32());
    }
}
