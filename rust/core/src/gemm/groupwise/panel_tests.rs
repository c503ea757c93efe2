//! The mode `bf16`.

use super::panels::Panels;
use super::tests::{activations, sets};
use super::*;
use crate::formats::groupwise::View;
use crate::formats::groupwise::tests::{case, spec, specs};
use crate::gemm::panel::{Backend, Line, Source};
use crate::gemm::{matmul, matmul_grouped};
use crate::pool;
use crate::simd::{Isa, Kind};

/// The maximum error of a weight rounded to bf16, relative to itself and to its scale.
const ROUNDING: (f64, f64) = (1.0 / 256.0, 1.0 / 65536.0);

/// A set, and whether matrix registers are emulated beside it.
type Way = (Isa, bool);

/// Products in the mode `bf16`.
fn products(view: &View, x: &[f32], offsets: &[usize], (isa, emulated): Way) -> Vec<f32> {
    let pool = pool::current().unwrap();
    let mut y = vec![f32::NAN; offsets[offsets.len() - 1] * view.layout().shape().rows];
    let mut projection = Groupwise::new(*view, Mode::Bf16, isa).unwrap();
    if emulated {
        projection.engine.panels = Some(Backend::emulated());
    }
    matmul_grouped(&projection, x, offsets, &mut y, &pool).unwrap();
    y
}

/// Every set, and emulated matrix registers if AVX-512 is available beside them.
fn ways() -> impl Iterator<Item = Way> {
    let emulated = Isa::new(Kind::Avx512).map(|isa| (isa, true));
    sets().map(|isa| (isa, false)).chain(emulated)
}

#[test]
fn rounded_panels_hold_the_weights() {
    for spec in specs() {
        let blob = case(2, 19, 330, spec).blob;
        let view = View::parse(&blob).unwrap();
        for backend in sets().filter_map(Backend::of_bf16) {
            let source = Panels::new(view, backend);
            for row in 0..2 * 19 {
                let (block, lane) = (row / 19 * 2 + row % 19 / 16, row % 19 % 16);
                let mut lines = [Line::ZERO; 4 * 16];
                source.decode(block, &mut (), 6..10, &mut lines);
                let mut values = vec![0.0; 330];
                view.decode_values(row, &mut values);
                for (column, &value) in values.iter().enumerate().take(320).skip(192) {
                    let word = lines[(column - 192) / 2].0[lane];
                    let found = f32::from_bits(word << (16 * (1 - column % 2)) & 0xffff_0000);
                    let (scale, _) = view.parameters(row, column / view.layout().group_size());
                    let (value, scale) = (f64::from(value), f64::from(scale).abs());
                    let bound = ROUNDING.0 * value.abs() + ROUNDING.1 * scale;
                    assert!(
                        (f64::from(found) - value).abs() <= bound,
                        "{spec:?} {backend:?}: {found} for {value}"
                    );
                }
            }
        }
    }
}

/// Compared with decoded weights in f64: the relative error of each factor is at most 2^-8, that of a sum C 2^-24 of
/// its terms.
#[test]
fn products_are_within_their_bound_on_every_set() {
    for spec in specs() {
        let blob = case(2, 19, 330, spec).blob;
        let view = View::parse(&blob).unwrap();
        let (x, offsets) = (activations(75 * 330), [0, 35, 75]);
        for way in ways() {
            let y = products(&view, &x, &offsets, way);
            let mut values = vec![0.0; 330];
            for (token, row) in (0..75).flat_map(|token| (0..19).map(move |row| (token, row))) {
                let row_of_all = usize::from(token >= 35) * 19 + row;
                view.decode_values(row_of_all, &mut values);
                let (mut sum, mut bound) = (0.0, 0.0);
                for (column, (&value, &x)) in values.iter().zip(&x[token * 330..]).enumerate() {
                    let (scale, _) = view.parameters(row_of_all, column / view.layout().group_size());
                    let (term, scale) = (f64::from(value) * f64::from(x), f64::from(scale * x).abs());
                    sum += term;
                    bound += 2.1 * ROUNDING.0 * term.abs()
                        + 2.0 * ROUNDING.1 * scale
                        + 330.0 * 2f64.powi(-24) * term.abs();
                }
                let found = f64::from(y[token * 19 + row]);
                assert!(
                    (found - sum).abs() <= bound,
                    "{spec:?} {way:?}: {found} for {sum} +- {bound}"
                );
            }
        }
    }
}

#[test]
fn few_tokens_are_exact_and_many_do_not_affect_each_other() {
    for bits in [4, 8] {
        let blob = case(3, 40, 192, spec(bits, 64, false)).blob;
        let view = View::parse(&blob).unwrap();
        let x = activations(70 * 192);
        for way in ways() {
            let few = [0, 1, 2, 3];
            let mut exact = vec![0.0; 3 * 40];
            let pool = pool::current().unwrap();
            let weights = Groupwise::new(view, Mode::Exact, way.0).unwrap();
            matmul_grouped(&weights, &x[..3 * 192], &few, &mut exact, &pool).unwrap();
            assert_eq!(products(&view, &x[..3 * 192], &few, way), exact);
            let all = products(&view, &x, &[0, 1, 30, 70], way);
            assert_eq!(all[..40], exact[..40]);
            let alone = products(&view, &x[30 * 192..], &[0, 0, 0, 40], way);
            assert_eq!(alone, all[30 * 40..]);
        }
    }
}

#[test]
fn bf16_activations_are_their_values_and_threads_change_nothing() {
    let blob = case(1, 300, 256, spec(3, 128, true)).blob;
    let view = View::parse(&blob).unwrap();
    let x: Vec<half::bf16> = activations(600 * 256)
        .into_iter()
        .map(half::bf16::from_f32)
        .collect();
    let bits: Vec<u16> = x.iter().map(|x| x.to_bits()).collect();
    let values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for isa in sets() {
        let expected = products(&view, &values, &[0, 600], (isa, false));
        let mut y = vec![f32::NAN; 600 * 300];
        let weights = Groupwise::new(view, Mode::Auto, isa).unwrap();
        matmul(&weights, 0, &bits[..], 600, &mut y, &one).unwrap();
        assert!(y == expected, "{isa:?}");
    }
}

#[test]
fn nan_and_infinity_affect_only_their_token() {
    for bits in [4, 8] {
        let blob = case(1, 20, 64, spec(bits, 32, false)).blob;
        let view = View::parse(&blob).unwrap();
        let mut x = activations(40 * 64);
        x[5 * 64 + 7] = f32::NAN;
        x[6 * 64 + 50] = f32::INFINITY;
        for way in ways() {
            let y = products(&view, &x, &[0, 40], way);
            for (token, y) in y.chunks(20).enumerate() {
                assert!(
                    y.iter().all(|y| y.is_finite() != matches!(token, 5 | 6)),
                    "{way:?} {token}"
                );
            }
        }
    }
}

#[test]
fn hostile_parameters_only_give_numbers() {
    let mut blob = case(1, 20, 100, spec(4, 32, false)).blob;
    blob[crate::formats::groupwise::HEADER_BYTES..].fill(0xff);
    let view = View::parse(&blob).unwrap();
    for way in ways() {
        products(&view, &activations(40 * 100), &[0, 40], way);
    }
}
