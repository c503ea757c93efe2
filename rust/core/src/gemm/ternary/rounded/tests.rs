use super::*;
use crate::formats::ternary::{Code, encode};
use crate::gemm::panel::tests::{assert_bounds, assert_panels, backends, numbers, product, tasks};
use crate::pool;

/// A packed tensor and its rounded weights.
struct Sample {
    shape: Shape,
    blob: Vec<u8>,
    weights: Vec<half::bf16>,
}

impl Sample {
    /// Rows of all kinds: zeros, one level only, dense ones, and mixtures.
    fn new(code: Code, [experts, rows, columns]: [usize; 3]) -> Sample {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        let sizes = numbers(experts * rows * columns.max(2), 7);
        let mut codes = Vec::new();
        for (row, sizes) in sizes.chunks(columns.max(1)).take(experts * rows).enumerate() {
            let (zeros, negative) = match row % 6 {
                1 => (2.0, true),
                2 => (0.885, false),
                3 => (0.1, true),
                _ => (0.885, true),
            };
            codes.extend(sizes[..columns].iter().map(|&size| match size % 1.0 {
                size if size.abs() < zeros => 0,
                size if size < 0.0 && negative => -1,
                _ => 1,
            }));
        }
        let levels: Vec<(f32, f32)> = (0..experts * rows)
            .map(|row| (-0.01 * (row % 50 + 1) as f32, 0.013 * (row % 7 + 1) as f32))
            .collect();
        let pool = pool::current().unwrap();
        let blob = encode(&codes, &levels, shape, code, &pool).unwrap();
        let value = |(at, &code): (usize, &i8)| {
            let (negative, positive) = levels[at / columns];
            half::bf16::from_f32([negative, 0.0, positive][(code + 1) as usize])
        };
        let weights = codes.iter().enumerate().map(value).collect();
        Sample { shape, blob, weights }
    }

    fn row(&self, expert: usize, row: usize) -> Vec<half::bf16> {
        let Shape { rows, columns, .. } = self.shape;
        self.weights[(expert * rows + row) * columns..][..columns].to_vec()
    }
}

const SHAPES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [2, 17, 33],
    [3, 70, 130],
    [1, 16, 64],
    [1, 130, 1030],
    [2, 1, 7],
    [1, 33, 5000],
];

fn samples() -> impl Iterator<Item = (Code, Sample)> {
    Code::ALL
        .into_iter()
        .flat_map(|code| SHAPES.map(|shape| (code, Sample::new(code, shape))))
}

#[test]
fn panels_hold_the_rounded_weights() {
    for (code, sample) in samples() {
        let view = TernaryView::parse(&sample.blob).unwrap();
        let source = Rounded::new(view, Backend::PORTABLE);
        let what = format!("{code:?} {:?}", sample.shape);
        assert_panels(source, |e, row| sample.row(e, row), |word| word, &what);
    }
}

#[test]
fn products_are_within_their_bound_on_every_backend() {
    for (code, sample) in samples() {
        let view = TernaryView::parse(&sample.blob).unwrap();
        let columns = sample.shape.columns;
        let tasks = tasks(&[17, 1, 18][..sample.shape.experts]);
        let x = numbers(tasks.last().unwrap().places.end * columns, 4);
        for backend in backends() {
            let product =
                |threads| product(Rounded::new(view.clone(), backend), &x, &tasks, backend, threads);
            let (y, what) = (product(2), format!("{backend:?} {code:?} {:?}", sample.shape));
            assert_bounds(sample.shape, |e, row| sample.row(e, row), &x, &tasks, &y, &what);
            assert_eq!(y, product(1));
        }
    }
}

#[test]
fn nan_and_infinity_affect_only_their_token() {
    let sample = Sample::new(Code::Fsv8, [1, 20, 64]);
    let view = TernaryView::parse(&sample.blob).unwrap();
    let mut x = numbers(20 * 64, 3);
    x[5 * 64 + 7] = f32::NAN;
    for backend in backends() {
        let y = product(Rounded::new(view.clone(), backend), &x, &tasks(&[20]), backend, 1);
        for (token, y) in y.chunks(20).enumerate() {
            assert!(
                y.iter().all(|y| y.is_nan() == (token == 5)),
                "{backend:?} {token}"
            );
        }
    }
}

/// Codes that no encoder writes: payloads of a single repeated byte, and of changing bytes.
#[test]
fn damaged_codes_only_give_numbers() {
    for (code, mut sample) in samples() {
        let payload = TernaryView::parse(&sample.blob).unwrap().payload_bytes();
        let padded = TernaryView::parse(&sample.blob).unwrap().padded_payload().len();
        let start = sample.blob.len() - padded;
        for seed in [0u8, 0xff, 0x80, 37] {
            for (i, byte) in sample.blob[start..start + payload].iter_mut().enumerate() {
                *byte = if seed == 37 { (i * 37) as u8 } else { seed };
            }
            let view = TernaryView::parse(&sample.blob).unwrap();
            let x = numbers(20 * sample.shape.columns, 1);
            let source = Rounded::new(view, Backend::PORTABLE);
            let y = product(source, &x, &tasks(&[20]), Backend::PORTABLE, 1);
            assert_eq!(y.len(), 20 * sample.shape.rows, "{code:?}");
        }
    }
}
