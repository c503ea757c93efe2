use half::bf16;

use super::*;
use crate::formats::codebook::HEADER_BYTES;
use crate::formats::codebook::tests::Case;
use crate::gemm::panel::tests::{assert_bounds, assert_panels, backends, numbers, product, tasks};
use crate::hadamard::rotate;

/// Experts, rows and columns; the columns of a block.
const SHAPES: [([usize; 3], usize); 7] = [
    ([3, 5, 130], 128),
    ([2, 40, 256], 1024),
    ([1, 17, 520], 256),
    ([2, 1, 7], 128),
    ([1, 16, 33], 128),
    ([1, 3, 1], 128),
    ([1, 35, 1300], 384),
];

/// The rounded weights of a row.
fn weights(view: &View, expert: usize, row: usize) -> Vec<bf16> {
    let mut values = vec![0.0; view.layout().shape().columns];
    view.decode_values(expert, row, &mut values);
    values.into_iter().map(bf16::from_f32).collect()
}

/// Tensors of all bits and shapes, with two-byte and one-byte centroids.
fn cases() -> impl Iterator<Item = Case> {
    (2..=4).flat_map(|bits| {
        SHAPES
            .into_iter()
            .flat_map(move |(shape, block)| Case::both(bits, shape, block))
    })
}

#[test]
fn panels_hold_the_rounded_weights_on_every_set() {
    for case in cases() {
        let blob = case.blob();
        let view = View::parse(&blob).unwrap();
        let order = |word| if case.bits == 2 { word } else { row(word) };
        for backend in backends() {
            let what = format!("{backend:?} {} bits, {:?}", case.bits, case.shape);
            let weights = |expert, row| weights(&view, expert, row);
            assert_panels(Rounded::new(view, backend), weights, order, &what);
        }
    }
}

#[test]
fn products_are_within_their_bound_on_every_backend() {
    for case in cases() {
        let blob = case.blob();
        let view = View::parse(&blob).unwrap();
        let columns = case.shape.columns;
        let x = numbers(36 * columns, 4);
        let tasks = tasks(&[17, 1, 18][..case.shape.experts]);
        let x = &x[..tasks.last().unwrap().places.end * columns];
        for backend in backends() {
            let y = product(Rounded::new(view, backend), x, &tasks, backend, 2);
            let what = format!("{backend:?} {} bits, {:?}", case.bits, case.shape);
            assert_bounds(case.shape, |e, row| weights(&view, e, row), x, &tasks, &y, &what);
            assert_eq!(y, product(Rounded::new(view, backend), x, &tasks, backend, 1));
        }
    }
}

#[test]
fn rotated_tensors_rotate_their_activations() {
    for bits in 2..=4 {
        let case = Case::new(bits, [1, 21, 192], 128);
        let plain = case.blob();
        let rotated = Case { hadamard: 64, ..case }.blob();
        let (plain, rotated) = (View::parse(&plain).unwrap(), View::parse(&rotated).unwrap());
        let x = numbers(20 * 192, 9);
        let mut first = x.clone();
        rotate(Isa::SCALAR, &mut first, 64);
        for backend in backends() {
            let product =
                |view, x: &[f32]| product(Rounded::new(view, backend), x, &tasks(&[20]), backend, 1);
            assert_eq!(product(rotated, &x), product(plain, &first), "{backend:?} {bits}");
        }
    }
}

#[test]
fn nan_and_infinity_affect_only_their_token() {
    for bits in 2..=4 {
        let blob = Case::new(bits, [1, 20, 64], 128).blob();
        let view = View::parse(&blob).unwrap();
        let mut x = numbers(20 * 64, 3);
        (x[5 * 64 + 7], x[6 * 64 + 50]) = (f32::NAN, f32::INFINITY);
        for backend in backends() {
            let y = product(Rounded::new(view, backend), &x, &tasks(&[20]), backend, 1);
            for (token, y) in y.chunks(20).enumerate() {
                let odd = matches!(token, 5 | 6);
                assert!(y.iter().all(|y| y.is_finite() != odd), "{backend:?} {token}");
            }
        }
    }
}

#[test]
fn hostile_parameters_only_give_numbers() {
    for case in (2..=4).flat_map(|bits| Case::both(bits, [1, 20, 300], 128)) {
        let mut blob = case.blob();
        for byte in [0xff, 0x7f] {
            blob[HEADER_BYTES..].fill(byte);
            let view = View::parse(&blob).unwrap();
            for backend in backends() {
                let x = numbers(20 * 300, 1);
                product(Rounded::new(view, backend), &x, &tasks(&[20]), backend, 1);
            }
        }
    }
}
