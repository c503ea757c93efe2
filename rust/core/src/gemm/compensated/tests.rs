//! Products compared with a naive sum in f64, on every instruction set.

use super::*;
use crate::formats::compensated::View;
use crate::formats::compensated::chunk::Width;
use crate::formats::compensated::tests::case;
use crate::gemm::groupwise::{Groupwise, MODES};
use crate::gemm::{layer, matmul, matmul_grouped};
use crate::pool;
use crate::simd::Isa;
use crate::types::Mode;

fn weights<'a>(view: &View<'a>, mode: Mode, isa: Isa) -> Compensated<'a> {
    Compensated::new(view.clone(), mode, isa).unwrap()
}

fn activations(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 37 + 11) % 64) as f32 / 32.0 - 1.0)
        .collect()
}

fn sets() -> Vec<Isa> {
    Isa::all_available().collect()
}

/// The compensator's contribution, and the sum of absolute products.
fn naive(
    case: &crate::formats::compensated::tests::Case,
    sizes: [usize; 2],
    expert: usize,
    x: &[f32],
) -> Vec<(f64, f64)> {
    let [rows, columns] = sizes;
    let first: usize = case.ranks[..expert].iter().sum();
    (0..rows)
        .map(|row| {
            let (mut sum, mut size) = (0.0, 0.0);
            for k in first..first + case.ranks[expert] {
                for (c, &x) in x.iter().enumerate() {
                    let product = f64::from(case.left[k * rows + row])
                        * f64::from(case.right[k * columns + c])
                        * f64::from(x);
                    (sum, size) = (sum + product, size + product.abs());
                }
            }
            (sum, size)
        })
        .collect()
}

#[test]
fn products_match_the_naive_sum_on_every_set() {
    let pool = pool::current().unwrap();
    for width in Width::ALL {
        for (ranks, rows, columns, counts) in [
            (vec![3, 0, 8], 20, 70, vec![1, 2, 3]),
            (vec![16, 16], 200, 130, vec![0, 9]),
            (vec![8], 4, 300, vec![1]),
            (vec![5, 4, 3], 70, 64, vec![17, 0, 1]),
            (vec![2, 1], 16, 8200, vec![21, 3]),
        ] {
            let ranks: Vec<usize> = ranks.iter().map(|&r: &usize| r.min(rows).min(columns)).collect();
            let case = case(&ranks, rows, columns, width);
            let view = View::parse(&case.blob).unwrap();
            let mut offsets = vec![0];
            counts
                .iter()
                .for_each(|n: &usize| offsets.push(offsets[offsets.len() - 1] + n));
            let tokens = offsets[offsets.len() - 1];
            let x = activations(tokens * columns);
            let mut first: Option<Vec<f32>> = None;
            for isa in sets() {
                let (mut y, mut plain) = (vec![f32::NAN; tokens * rows], vec![0.0; tokens * rows]);
                matmul_grouped(&weights(&view, Mode::Exact, isa), &x[..], &offsets, &mut y, &pool).unwrap();
                let base = Groupwise::new(*view.base(), Mode::Exact, isa).unwrap();
                matmul_grouped(&base, &x[..], &offsets, &mut plain, &pool).unwrap();
                for expert in 0..ranks.len() {
                    for token in offsets[expert]..offsets[expert + 1] {
                        let x = &x[token * columns..][..columns];
                        for (row, (sum, size)) in
                            naive(&case, [rows, columns], expert, x).into_iter().enumerate()
                        {
                            let at = token * rows + row;
                            let (found, base) = (f64::from(y[at]), f64::from(plain[at]));
                            let terms = columns as f64 / 8.0 + ranks[expert] as f64 + 18.0;
                            let bound =
                                terms * 2f64.powi(-24) * size + 2f64.powi(-23) * (base.abs() + found.abs());
                            assert!((found - base - sum).abs() <= bound, "{width:?} {isa:?}");
                        }
                    }
                }
                // Exact group-wise products give the same bits on every set.
                assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "{isa:?}");
            }
        }
    }
}

#[test]
fn one_expert_and_bf16_and_threads_change_nothing() {
    let case = case(&[4, 7], 150, 90, Width::Three);
    let view = View::parse(&case.blob).unwrap();
    let values: Vec<half::bf16> = activations(270).into_iter().map(half::bf16::from_f32).collect();
    let bits: Vec<u16> = values.iter().map(|x| x.to_bits()).collect();
    let x: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
    let isa = Isa::SCALAR;
    let mut results = Vec::new();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut y = [vec![0.0; 450], vec![0.0; 450], vec![0.0; 450]];
        matmul(&weights(&view, Mode::Exact, isa), 1, &x[..], 3, &mut y[0], &pool).unwrap();
        matmul(
            &weights(&view, Mode::Exact, isa),
            1,
            &bits[..],
            3,
            &mut y[1],
            &pool,
        )
        .unwrap();
        matmul_grouped(
            &weights(&view, Mode::Exact, isa),
            &x[..],
            &[0, 0, 3],
            &mut y[2],
            &pool,
        )
        .unwrap();
        results.extend(y);
    }
    assert!(results.iter().all(|y| *y == results[0]));
}

#[test]
fn work_for_several_threads_gives_the_same() {
    let case = case(&[8, 5], 200, 250, Width::Three);
    let view = View::parse(&case.blob).unwrap();
    let offsets = [0, 599, 600];
    let x = activations(600 * 250);
    let results = [1, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut y = vec![0.5; 600 * 200];
        matmul_grouped(
            &weights(&view, Mode::Int8, Isa::SCALAR),
            &x[..],
            &offsets,
            &mut y,
            &pool,
        )
        .unwrap();
        y
    });
    assert!(results[0] == results[1]);
}

#[test]
fn a_layer_is_its_products() {
    let pool = pool::current().unwrap();
    let blobs = [
        case(&[8, 0, 5], 150, 90, Width::Three).blob,
        case(&[3, 16, 0], 150, 90, Width::Eight).blob,
        case(&[7, 8, 24], 90, 150, Width::Half).blob,
    ];
    let views = blobs.each_ref().map(|blob| View::parse(blob).unwrap());
    let (experts, shares) = ([2i64, 0, 1, 2, 7, 1, 0, 1, 2, 1], [0.5f32; 10]);
    for (isa, mode) in sets().into_iter().flat_map(|isa| MODES.map(|mode| (isa, mode))) {
        let [gate, up, down] = views.each_ref().map(|view| weights(view, mode, isa));
        let (x, mut y) = (activations(5 * 90), vec![f32::NAN; 5 * 90]);
        let routing = layer::Routing {
            experts: &experts,
            weights: &shares,
            top_k: 2,
        };
        layer::Layer::new(&gate, &up, &down)
            .forward(&x[..], routing, &mut y, isa, &pool)
            .unwrap();
        let product = |view: &View, expert: usize, x: &[f32]| {
            let mut y = vec![0.0; view.layout().shape().rows];
            matmul(&weights(view, mode, isa), expert, x, 1, &mut y, &pool).unwrap();
            y
        };
        let mut expected = vec![0.0f32; 5 * 90];
        for (pair, &expert) in experts.iter().enumerate().filter(|(_, expert)| **expert < 3) {
            let (token, expert) = (pair / 2, expert as usize);
            let x = &x[token * 90..][..90];
            let mut hidden = product(&views[0], expert, x);
            layer::gated(isa, &mut hidden, &product(&views[1], expert, x));
            let out = product(&views[2], expert, &hidden);
            let sums = &mut expected[token * 90..][..90];
            sums.iter_mut()
                .zip(out)
                .for_each(|(sum, value)| *sum += 0.5 * value);
        }
        // The rounding of bf16 depends on the number of an expert's tokens; the integer modes give the same bits.
        let largest = expected.iter().fold(0f32, |most, y| most.max(y.abs()));
        let bound = if matches!(mode, Mode::Auto | Mode::Bf16) {
            0.01 * largest
        } else {
            0.0
        };
        for (y, expected) in y.iter().zip(&expected) {
            let near = (y - expected).abs() <= bound;
            assert!(near, "{y} instead of {expected} +- {bound}, {isa:?} {mode:?}");
        }
    }
}

#[test]
fn sizes_are_checked() {
    let pool = pool::current().unwrap();
    let case = case(&[4, 2], 6, 8, Width::Eight);
    let view = View::parse(&case.blob).unwrap();
    let x = activations(16);
    for (offsets, outputs) in [
        (vec![0, 2], 12),
        (vec![0, 2, 1], 12),
        (vec![0, 1, 2], 11),
        (vec![1, 1, 2], 12),
        (vec![0, 1, 3], 18),
    ] {
        let mut y = vec![0.0; outputs];
        assert!(
            matmul_grouped(
                &weights(&view, Mode::Exact, Isa::SCALAR),
                &x[..],
                &offsets,
                &mut y,
                &pool
            )
            .is_err()
        );
    }
    let exact = weights(&view, Mode::Exact, Isa::SCALAR);
    assert!(matmul(&exact, 2, &x[..], 2, &mut [0.0; 12], &pool).is_err());
    assert!(Compensated::new(view, Mode::Int16, Isa::SCALAR).is_err());
}

#[test]
fn empty_tensors() {
    let pool = pool::current().unwrap();
    for (ranks, rows, columns) in [
        (vec![], 3, 4),
        (vec![0, 0], 0, 4),
        (vec![0, 0], 3, 0),
        (vec![0, 0], 3, 4),
    ] {
        let case = case(&ranks, rows, columns, Width::Three);
        let view = View::parse(&case.blob).unwrap();
        let offsets: Vec<usize> = (0..=ranks.len()).collect();
        let mut y = vec![1.0; ranks.len() * rows];
        let x = activations(ranks.len() * columns);
        matmul_grouped(
            &weights(&view, Mode::Exact, Isa::SCALAR),
            &x[..],
            &offsets,
            &mut y,
            &pool,
        )
        .unwrap();
    }
}
