use super::*;
use crate::formats::codebook::View;
use crate::formats::codebook::tests::Case;
use crate::gemm::matmul_grouped;
use crate::pool;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// A compute mode and the bits of an activation.
type Rounding = (Mode, Option<u8>);

const INTEGERS: [Rounding; 4] = [
    (Mode::Int8, Some(8)),
    (Mode::Int8, Some(4)),
    (Mode::Int16, Some(8)),
    (Mode::Int16, Some(4)),
];
const EXACT: Rounding = (Mode::Exact, None);

fn sets() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

fn activations(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7919 % 1009) as f32 / 504.0 - 0.7) * 0.9)
        .collect()
}

fn weights<'a>(view: &View<'a>, (mode, bits): Rounding, isa: Isa) -> Codebook<'a> {
    Codebook::with_activation_bits(*view, mode, bits, isa).unwrap()
}

fn product(view: &View, x: &[f32], offsets: &[usize], mode: Rounding, isa: Isa) -> Vec<f32> {
    let mut y = vec![f32::NAN; offsets[offsets.len() - 1] * view.layout().shape().rows];
    matmul_grouped(
        &weights(view, mode, isa),
        x,
        offsets,
        &mut y,
        &pool::current().unwrap(),
    )
    .unwrap();
    y
}

/// A token's activations as rounded by `mode`, and the step. Computed in f32, so that ties are broken as in kernels.
fn rounded_token(x: &[f32], mode: Rounding) -> (Vec<f64>, f64) {
    let Some(bits) = mode.1 else {
        return (x.iter().map(|&x| f64::from(x)).collect(), 0.0);
    };
    let top = ((1 << bits) - 1) as f32;
    let (low, high) = x.iter().fold((0f32, 0f32), |(l, h), &x| (l.min(x), h.max(x)));
    let step = (high - low) / top;
    let inverse = 1.0 / step;
    let zero = (-low * inverse + 0.5).floor();
    let code = |x: f32| (x * inverse + (zero + 0.5)).floor().clamp(0.0, top);
    let value = |&x: &f32| f64::from(step) * f64::from(code(x) - zero);
    (x.iter().map(value).collect(), step.into())
}

/// Asserts that every output is within the module's bound of the product of dequantized weights.
fn assert_bounds(view: &View, x: &[f32], offsets: &[usize], mode: Rounding, y: &[f32]) {
    let layout = view.layout();
    let shape = layout.shape();
    let mut weights = vec![0.0; shape.columns];
    for expert in 0..shape.experts {
        for row in 0..shape.rows {
            view.decode_values(expert, row, &mut weights);
            let scales = (0..layout.blocks()).map(|b| view.block(expert, row / 16, b).scales()[row % 16]);
            let largest = scales.fold(0f32, f32::max);
            for token in offsets[expert]..offsets[expert + 1] {
                let x = &x[token * shape.columns..][..shape.columns];
                let (rounded, step) = rounded_token(x, mode);
                let products = weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let size: f64 = products.clone().map(f64::abs).sum();
                let mut bound =
                    (shape.columns as f64 / 16.0 + layout.blocks() as f64 + 7.0) * 2f64.powi(-24) * size;
                if mode != EXACT {
                    bound += step * 0.501 * weights.iter().map(|&w| f64::from(w.abs())).sum::<f64>();
                }
                if mode.0 == Mode::Int8 {
                    bound += 128.0 * f64::from(largest) * rounded.iter().map(|x| x.abs()).sum::<f64>();
                }
                let (found, expected) = (f64::from(y[token * shape.rows + row]), products.sum::<f64>());
                let place = (layout.bits(), expert, row, token);
                assert!(
                    (found - expected).abs() <= bound,
                    "{mode:?} {place:?}: {found}, not {expected} +- {bound}"
                );
            }
        }
    }
}

fn ascending(counts: &[usize]) -> Vec<usize> {
    let sums = counts.iter().scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Experts, rows and columns; the columns of a block.
const SHAPES: [([usize; 3], usize); 5] = [
    ([3, 5, 130], 128),
    ([2, 40, 256], 1024),
    ([1, 17, 520], 256),
    ([2, 1, 7], 128),
    ([1, 35, 1300], 1280),
];

#[test]
fn products_are_within_their_bounds_on_every_set() {
    for bits in 2..=4 {
        for (shape, block) in SHAPES {
            for case in Case::both(bits, shape, block) {
                let blob = case.blob();
                let view = View::parse(&blob).unwrap();
                for counts in [[1, 0, 0], [0, 9, 2], [4, 3, 17], [2, 8, 6]] {
                    let offsets = ascending(&counts[..shape[0]]);
                    let x = activations(offsets[shape[0]] * shape[2]);
                    for mode in INTEGERS.into_iter().chain([EXACT]) {
                        for isa in sets() {
                            let y = product(&view, &x, &offsets, mode, isa);
                            assert_bounds(&view, &x, &offsets, mode, &y);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn centroids_of_one_byte_give_the_products_of_two_bytes() {
    for bits in 2..=4 {
        for (shape, block) in SHAPES {
            let one = Case::new(bits, shape, block).of_one_byte();
            let short = one.blob();
            let two = Case {
                activation_bits: 0,
                ..one
            }
            .blob();
            let (short, two) = (View::parse(&short).unwrap(), View::parse(&two).unwrap());
            let offsets = ascending(&[1, 5, 14][..shape[0]]);
            let x = activations(offsets[shape[0]] * shape[2]);
            for mode in INTEGERS.into_iter().chain([EXACT]) {
                for isa in sets() {
                    let expected = product(&two, &x, &offsets, mode, isa);
                    assert_eq!(
                        product(&short, &x, &offsets, mode, isa),
                        expected,
                        "{isa:?} {mode:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn integer_modes_give_the_naive_sums_and_the_same_bits_on_every_set() {
    for bits in 2..=4 {
        for (shape, block) in SHAPES {
            for case in Case::both(bits, shape, block) {
                let blob = case.blob();
                let view = View::parse(&blob).unwrap();
                let counts = [1, 5, 14];
                let offsets = ascending(&counts[..shape[0]]);
                let x = activations(offsets[shape[0]] * shape[2]);
                for mode in INTEGERS {
                    let expected = naive(&view, &x, &offsets, mode);
                    for isa in sets() {
                        let y = product(&view, &x, &offsets, mode, isa);
                        for (found, expected) in y.iter().zip(&expected) {
                            let bound = 1e-5 * expected.abs() + 1e-6;
                            assert!((f64::from(*found) - expected).abs() <= bound, "{isa:?} {mode:?}");
                        }
                        assert_eq!(
                            y,
                            product(&view, &x, &offsets, mode, Isa::SCALAR),
                            "{isa:?} {mode:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn pieces_give_the_same_bits_for_any_number_of_tokens() {
    for (bits, block) in [(2, 4096), (3, 1152), (4, 4096), (4, 1280), (4, 128)] {
        let [two, one] = Case::both(bits, [1, 20, 2100], block).map(|case| case.blob());
        for (blob, mode) in [(&two, INTEGERS[2]), (&one, INTEGERS[0])] {
            let view = View::parse(blob).unwrap();
            for tokens in (5..=18).chain([33]) {
                let x = activations(tokens * 2100);
                let expected = product(&view, &x, &[0, tokens], mode, Isa::SCALAR);
                for isa in sets() {
                    let y = product(&view, &x, &[0, tokens], mode, isa);
                    assert_eq!(y, expected, "{isa:?} {mode:?} {bits} {block} {tokens}");
                }
            }
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn panels_of_bytes_give_the_same_bits() {
    let Some(isa) = Isa::new(Kind::Avx512) else {
        return eprintln!("skipped: panels need AVX-512");
    };
    let pool = pool::current().unwrap();
    for bits in 2..=4 {
        for (shape, block) in [
            ([2, 40, 330], 128),
            ([2, 33, 2100], 1024),
            ([2, 16, 1200], 384),
            ([2, 5, 2500], 4096),
        ] {
            let [two, one] = Case::both(bits, shape, block);
            let blob = if bits == 3 { two } else { one }.blob();
            let view = View::parse(&blob).unwrap();
            let offsets = [0, 3, 40];
            let x = activations(40 * shape[2]);
            for mode in [8, 4].map(|bits| (Mode::Int8, Some(bits))) {
                let expected = product(&view, &x, &offsets, mode, isa);
                let mut projection = weights(&view, mode, isa);
                projection.panels = Some(crate::gemm::panel::Backend::emulated());
                let mut y = vec![f32::NAN; expected.len()];
                matmul_grouped(&projection, &x[..], &offsets, &mut y, &pool).unwrap();
                assert_eq!(y, expected, "{shape:?} {block} {mode:?}");
            }
        }
    }
}

/// The products of activations and centroids, rounded like the mode, in f64.
fn naive(view: &View, x: &[f32], offsets: &[usize], mode: Rounding) -> Vec<f64> {
    let layout = view.layout();
    let shape = layout.shape();
    let mut y = Vec::new();
    for expert in 0..shape.experts {
        for token in offsets[expert]..offsets[expert + 1] {
            let (x, _) = rounded_token(&x[token * shape.columns..][..shape.columns], mode);
            for row in 0..shape.rows {
                let mut codes = vec![0; shape.columns];
                view.decode_row(expert, row, &mut codes);
                let weight = |(column, &code): (usize, &u8)| {
                    let block = view.block(expert, row / 16, column / layout.block_size());
                    let centroid = f64::from(block.centroid(row % 16, code.into()));
                    let rounded = match mode.0 {
                        Mode::Int8 => 256.0 * ((centroid + 0.5) / 256.0).round(),
                        _ => centroid,
                    };
                    f64::from(block.scales()[row % 16]) * rounded
                };
                y.push(
                    codes
                        .iter()
                        .enumerate()
                        .map(weight)
                        .zip(&x)
                        .map(|(w, x)| w * x)
                        .sum(),
                );
            }
        }
    }
    y
}

#[test]
fn the_largest_sums_fit_their_integers() {
    let columns = 1 << 16;
    let mut case = Case::new(2, [1, 1, columns], 1 << 16);
    case.scales.fill(1.0);
    let x = vec![255.0; columns];
    for (code, isa) in (0..4).flat_map(|code| sets().map(move |isa| (code, isa))) {
        case.codes.fill(code);
        case.centroids.fill(-crate::formats::codebook::MAX_CENTROID);
        case.centroids[usize::from(code)] = crate::formats::codebook::MAX_CENTROID;
        let blob = case.blob();
        let view = View::parse(&blob).unwrap();
        view.verify().unwrap();
        for mode in [INTEGERS[0], INTEGERS[2]] {
            let centroid = if mode.0 == Mode::Int8 {
                127.0 * 256.0
            } else {
                32_639.0
            };
            let expected = centroid * 255.0 * columns as f32;
            assert_eq!(
                product(&view, &x, &[0, 1], mode, isa),
                [expected],
                "{isa:?} {mode:?}"
            );
            let negative: Vec<f32> = x.iter().map(|x| -x).collect();
            assert_eq!(
                product(&view, &negative, &[0, 1], mode, isa),
                [-expected],
                "{isa:?} {mode:?}"
            );
        }
    }
}

#[test]
fn bf16_activations_are_their_values_and_threads_change_nothing() {
    let blob = Case::new(4, [2, 50, 300], 128).blob();
    let view = View::parse(&blob).unwrap();
    let x: Vec<half::bf16> = activations(600 * 300)
        .into_iter()
        .map(half::bf16::from_f32)
        .collect();
    let bits: Vec<u16> = x.iter().map(|x| x.to_bits()).collect();
    let values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for mode in [EXACT, INTEGERS[0]] {
        for isa in sets() {
            let expected = product(&view, &values, &[0, 450, 600], mode, isa);
            let mut y = vec![0.0; 600 * 50];
            matmul_grouped(
                &weights(&view, mode, isa),
                &bits[..],
                &[0, 450, 600],
                &mut y,
                &one,
            )
            .unwrap();
            assert_eq!(y, expected);
        }
    }
}

#[test]
fn nan_affects_only_its_token_and_zeros_give_zeros() {
    let blob = Case::new(3, [1, 20, 200], 128).blob();
    let view = View::parse(&blob).unwrap();
    let mut x = activations(5 * 200);
    x[200 + 17] = f32::NAN;
    x[400 + 199] = f32::NEG_INFINITY;
    x[600..800].fill(0.0);
    for mode in INTEGERS {
        for isa in sets() {
            let y = product(&view, &x, &[0, 5], mode, isa);
            let rows: Vec<&[f32]> = y.chunks(20).collect();
            assert!(rows[1].iter().chain(rows[2]).all(|y| y.is_nan()));
            assert!(rows[3].iter().all(|&y| y == 0.0));
            assert!(rows[0].iter().chain(rows[4]).all(|y| y.is_finite()));
        }
    }
}

#[test]
fn hostile_parameters_only_give_numbers() {
    for case in Case::both(4, [1, 20, 100], 128) {
        let mut blob = case.blob();
        blob[crate::formats::codebook::HEADER_BYTES..].fill(0xff);
        let view = View::parse(&blob).unwrap();
        assert!(view.verify().is_err());
        for mode in INTEGERS.into_iter().chain([EXACT]) {
            for isa in sets() {
                for tokens in [1, 9] {
                    product(&view, &activations(tokens * 100), &[0, tokens], mode, isa);
                }
            }
        }
    }
}

#[test]
fn empty_tensors_and_wrong_sizes() {
    let pool = pool::current().unwrap();
    for shape in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        let blob = Case::new(4, shape, 128).blob();
        let view = View::parse(&blob).unwrap();
        let offsets: Vec<usize> = (0..=shape[0]).collect();
        for mode in [EXACT, INTEGERS[0]] {
            let y = product(
                &view,
                &activations(shape[0] * shape[2]),
                &offsets,
                mode,
                Isa::SCALAR,
            );
            assert!(y.iter().all(|&y| y == 0.0));
        }
    }
    let blob = Case::new(4, [2, 3, 64], 128).blob();
    let view = View::parse(&blob).unwrap();
    let x = activations(128);
    for (offsets, outputs) in [
        (vec![0, 2], 6),
        (vec![0, 2, 1], 6),
        (vec![0, 1, 2], 5),
        (vec![1, 1, 2], 6),
    ] {
        let y = &mut vec![0.0; outputs];
        assert!(matmul_grouped(&weights(&view, EXACT, Isa::SCALAR), &x[..], &offsets, y, &pool).is_err());
    }
    let bits = |mode, bits| Codebook::with_activation_bits(view, mode, Some(bits), Isa::SCALAR);
    assert!(bits(Mode::Int8, 5).is_err() && bits(Mode::Exact, 0).is_ok());
}

#[test]
fn rotated_tensors_rotate_their_activations() {
    let case = Case::new(4, [2, 21, 192], 128);
    let plain = case.blob();
    let rotated = Case { hadamard: 64, ..case }.blob();
    let (plain, rotated) = (View::parse(&plain).unwrap(), View::parse(&rotated).unwrap());
    let offsets = [0, 3, 5];
    let x = activations(5 * 192);
    let mut weights = vec![0.0; 192];
    for isa in sets() {
        let mut first = x.clone();
        crate::hadamard::rotate(isa, &mut first, 64);
        for mode in INTEGERS.into_iter().chain([EXACT]) {
            let found = product(&rotated, &x, &offsets, mode, isa);
            assert_eq!(
                found,
                product(&plain, &first, &offsets, mode, isa),
                "{mode:?} {isa:?}"
            );
        }
        let found = product(&rotated, &x, &offsets, EXACT, isa);
        for (at, found) in found.into_iter().enumerate() {
            let (token, row) = (at / 21, at % 21);
            rotated.decode_values(usize::from(token >= 3), row, &mut weights);
            let expected: f32 = weights.iter().zip(&x[token * 192..]).map(|(w, x)| w * x).sum();
            assert!(
                (found - expected).abs() < 1e-3,
                "{isa:?} {at}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn modes_are_resolved_by_the_bits_of_activations() {
    let layout = |activation_bits| {
        let case = Case {
            activation_bits,
            ..Case::new(3, [1, 4, 128], 128).of_one_byte()
        };
        View::parse(&case.blob()).unwrap().layout()
    };
    let (plain, rounded) = (layout(0), layout(4));
    let resolve = |mode, layout| Precision::resolve(mode, None, layout).unwrap();
    assert_eq!(resolve(Mode::Auto, &plain), Precision::Exact);
    assert_eq!(
        resolve(Mode::Auto, &rounded),
        Precision::Int8 { activation_bits: 4 }
    );
    assert_eq!(
        resolve(Mode::Int16, &rounded),
        Precision::Int8 { activation_bits: 4 }
    );
    assert_eq!(
        resolve(Mode::Int16, &plain),
        Precision::Int16 { activation_bits: 8 }
    );
    assert_eq!(resolve(Mode::Exact, &rounded), Precision::Exact);
}
