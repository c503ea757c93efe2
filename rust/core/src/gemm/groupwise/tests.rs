use half::bf16;

use super::tile::quantize;
use super::*;

use crate::formats::groupwise::tests::{case, spec, specs};
use crate::formats::groupwise::{Layout, Spec, View};
use crate::gemm::{matmul, matmul_grouped};
use crate::pool;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// The modes of integer products, which give the same bits on every instruction set.
pub(in crate::gemm) const INTEGERS: [Mode; 2] = [Mode::Exact, Mode::Int8];

pub(super) fn sets() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

pub(super) fn activations(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7919 % 1009) as f32 / 504.0 - 1.0) * if i % 97 == 5 { 11.0 } else { 0.7 })
        .collect()
}

/// The quantized activations of a mode, step by step.
fn quantized(layout: &Layout, x: &[f32], mode: Mode) -> Vec<f64> {
    let columns = layout.shape().columns;
    let step = if layout.spec().group == 0 {
        STEP_COLUMNS
    } else {
        layout.group_size()
    };
    let (precision, off_by) = match mode {
        Mode::Int8 => (Precision::Int8, 1.0 / 254.0),
        _ => (Precision::Exact, 2f64.powi(-23)),
    };
    let mut out = Vec::new();
    for token in x.chunks(columns) {
        for values in token.chunks(step) {
            let mut codes = [0; STEP_COLUMNS];
            let (scale, sum) = quantize(values, precision, &mut codes);
            assert_eq!(sum, codes[..values.len()].iter().sum::<i32>());
            let largest = values.iter().fold(0f64, |most, &x| most.max(f64::from(x).abs()));
            for (&code, &x) in codes.iter().zip(values) {
                let value = f64::from(scale) * f64::from(code);
                let bound = largest * off_by + 3.0 * 2f64.powi(-24) * f64::from(x).abs();
                assert!((value - f64::from(x)).abs() <= bound, "{x} became {value}");
                out.push(value);
            }
        }
    }
    out
}

/// Compares each output with decoded codes and parameters in f64, within the module's bound.
fn hold(view: &View, x: &[f32], offsets: &[usize], y: &[f32], mode: Mode) {
    let layout = view.layout();
    let shape = layout.shape();
    let x = quantized(&layout, x, mode);
    let terms = 2.0 * tile::Steps::new(&layout).count as f64 + 6.0;
    let mut codes = vec![0; shape.columns];
    for expert in 0..shape.experts {
        for row in 0..shape.rows {
            view.decode_row(expert * shape.rows + row, &mut codes);
            for token in offsets[expert]..offsets[expert + 1] {
                let (mut expected, mut size) = (0.0, 0.0);
                for (c, &code) in codes.iter().enumerate() {
                    let (scale, offset) = view.parameters(expert * shape.rows + row, c / layout.group_size());
                    let x = x[token * shape.columns + c];
                    let product = f64::from(scale) * f64::from(code) * x;
                    expected += product + f64::from(offset) * x;
                    size += product.abs() + (f64::from(offset) * x).abs();
                }
                let found = f64::from(y[token * shape.rows + row]);
                let bound = terms * 2f64.powi(-24) * size;
                assert!(
                    (found - expected).abs() <= bound,
                    "{found} instead of {expected} +- {bound}, {mode:?} {:?}",
                    layout.spec()
                );
            }
        }
    }
}

/// Emulates matrix registers with portable loops.
///
/// # Safety
/// As `Multiplier::multiply`.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn emulate(
    depth: usize,
    a: *const u8,
    stride: usize,
    b: *const u8,
    count: usize,
    c: *mut i32,
) {
    for (m, n) in (0..16).flat_map(|m| (0..16).map(move |n| (m, n))) {
        let mut sum = 0;
        for (part, k) in (0..count).flat_map(|part| (0..depth).map(move |k| (part, k))) {
            // SAFETY: the caller guarantees that both factors have `count` parts of 16 x depth bytes, and c has 256
            // words.
            let (a, b) = unsafe {
                (
                    *a.add(part * stride + m * depth + k) as i8,
                    *b.add(part * 16 * depth + k / 4 * 64 + n * 4 + k % 4),
                )
            };
            sum += i32::from(a) * i32::from(b);
        }
        // SAFETY: the caller guarantees that c has 256 words.
        unsafe { *c.add(m * 16 + n) = sum }
    }
}

/// Products with emulated matrix registers.
#[cfg(target_arch = "x86_64")]
pub(in crate::gemm) fn emulated<'a>(view: &View<'a>, mode: Mode, avx512: Isa) -> Groupwise<'a> {
    let mut projection = Groupwise::new(*view, mode, avx512).unwrap();
    projection.engine.matrix = drive::Matrix::Emulated;
    let panels = &mut projection.engine.panels;
    *panels = panels.map(|_| crate::gemm::panel::Backend::emulated());
    projection
}

#[test]
#[cfg(target_arch = "x86_64")]
fn matrix_registers_give_the_same_bits_as_vectors() {
    let Some(avx512) = Isa::new(Kind::Avx512) else {
        return eprintln!("skipped: scaling the sums of matrix registers needs AVX-512");
    };
    let pool = pool::current().unwrap();
    for spec in specs() {
        let blob = case(2, 19, 330, spec).blob;
        let view = View::parse(&blob).unwrap();
        let x = activations(24 * 330);
        for mode in INTEGERS {
            let expected = products(&view, &x, &[0, 3, 24], mode, avx512);
            let mut y = vec![f32::NAN; 24 * 19];
            let projection = emulated(&view, mode, avx512);
            matmul_grouped(&projection, &x[..], &[0, 3, 24], &mut y, &pool).unwrap();
            assert_eq!(y, expected, "{spec:?} {mode:?}");
        }
    }
}

fn products(view: &View, x: &[f32], offsets: &[usize], mode: Mode, isa: Isa) -> Vec<f32> {
    let pool = pool::current().unwrap();
    let mut y = vec![f32::NAN; offsets[offsets.len() - 1] * view.layout().shape().rows];
    matmul_grouped(
        &Groupwise::new(*view, mode, isa).unwrap(),
        x,
        offsets,
        &mut y,
        &pool,
    )
    .unwrap();
    y
}

#[test]
fn products_match_the_decoded_weights_for_every_spec_and_set() {
    for spec in specs() {
        let blob = case(2, 19, 330, spec).blob;
        let view = View::parse(&blob).unwrap();
        let x = activations(4 * 330);
        let offsets = [0, 1, 4];
        for mode in INTEGERS {
            let reference = products(&view, &x, &offsets, mode, Isa::SCALAR);
            hold(&view, &x, &offsets, &reference, mode);
            for isa in sets() {
                let y = products(&view, &x, &offsets, mode, isa);
                hold(&view, &x, &offsets, &y, mode);
                assert_eq!(y, reference, "{spec:?} {isa:?}");
            }
        }
    }
}

#[test]
fn any_number_of_tokens_gives_each_token_the_same() {
    for (spec, columns) in [
        (spec(4, 64, false), 192),
        (spec(3, 16, true), 48),
        (spec(8, 0, false), 600),
    ] {
        let blob = case(3, 20, columns, spec).blob;
        let view = View::parse(&blob).unwrap();
        for (mode, isa) in INTEGERS
            .into_iter()
            .flat_map(|mode| sets().map(move |isa| (mode, isa)))
        {
            for offsets in [
                [0, 0, 13, 14],
                [0, 3, 9, 9],
                [0, 5, 5, 22],
                [0, 8, 12, 28],
                [0, 0, 0, 0],
            ] {
                let x = activations(offsets[3] * columns);
                let y = products(&view, &x, &offsets, mode, isa);
                hold(&view, &x, &offsets, &y, mode);
                for expert in 0..3 {
                    for token in offsets[expert]..offsets[expert + 1] {
                        let mut alone = vec![0.0; 20];
                        let x = &x[token * columns..][..columns];
                        let pool = pool::current().unwrap();
                        let weights = Groupwise::new(view, mode, isa).unwrap();
                        matmul(&weights, expert, x, 1, &mut alone, &pool).unwrap();
                        assert_eq!(alone, y[token * 20..][..20]);
                    }
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let blob = case(2, 700, 512, spec(4, 128, false)).blob;
    let view = View::parse(&blob).unwrap();
    let x = activations(200 * 512);
    let product = |threads, mode| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut y = vec![0.0; 200 * 700];
        let weights = Groupwise::new(view, mode, crate::simd::active().unwrap()).unwrap();
        matmul_grouped(&weights, &x[..], &[0, 3, 200], &mut y, &pool).unwrap();
        y
    };
    for mode in INTEGERS {
        assert_eq!(product(1, mode), product(3, mode));
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_overflow() {
    for bits in crate::bits::WIDTHS {
        for group in [256, 0] {
            let spec = spec(bits, group, false);
            let (rows, columns) = (16, 512);
            let shape = crate::types::Shape {
                experts: 1,
                rows,
                columns,
                ndim: 2,
            };
            let groups = Layout::new(shape, spec).unwrap().groups();
            let codes = vec![((1u32 << bits) - 1) as u8; rows * columns];
            let parameters = vec![1.0; rows * groups];
            let pool = pool::current().unwrap();
            let blob =
                crate::formats::groupwise::encode(&codes, &parameters, Some(&parameters), shape, spec, &pool)
                    .unwrap();
            let view = View::parse(&blob).unwrap();
            for sign in [1.0, -1.0] {
                for (mode, isa) in INTEGERS
                    .into_iter()
                    .flat_map(|mode| sets().map(move |isa| (mode, isa)))
                {
                    let y = products(&view, &vec![sign; columns], &[0, 1], mode, isa);
                    let expected = sign * (columns << bits) as f32;
                    assert!(
                        y.iter().all(|y| (y - expected).abs() <= 1e-5 * expected.abs()),
                        "{mode:?} {isa:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_activations_are_their_values() {
    let pool = pool::current().unwrap();
    let blob = case(1, 6, 100, spec(4, 32, true)).blob;
    let view = View::parse(&blob).unwrap();
    let x: Vec<bf16> = activations(300).into_iter().map(bf16::from_f32).collect();
    let bits: Vec<u16> = x.iter().map(|x| x.to_bits()).collect();
    let values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    for (mode, isa) in INTEGERS
        .into_iter()
        .flat_map(|mode| sets().map(move |isa| (mode, isa)))
    {
        let (mut a, mut b) = (vec![0.0; 18], vec![0.0; 18]);
        let weights = Groupwise::new(view, mode, isa).unwrap();
        matmul(&weights, 0, &bits[..], 3, &mut a, &pool).unwrap();
        matmul(&weights, 0, &values[..], 3, &mut b, &pool).unwrap();
        assert_eq!(a, b);
    }
}

#[test]
fn activations_that_are_zero_tiny_or_not_finite() {
    let blob = case(1, 5, 64, spec(4, 32, false)).blob;
    let view = View::parse(&blob).unwrap();
    for isa in sets() {
        let product = |x: f32, mode| {
            let mut values = vec![0.0; 64];
            values[40] = x;
            products(&view, &values, &[0, 1], mode, isa)
        };
        for mode in INTEGERS {
            assert!(product(0.0, mode).iter().all(|&y| y == 0.0));
            assert!(product(f32::NAN, mode).iter().all(|y| y.is_nan()));
            assert!(product(f32::INFINITY, mode).iter().all(|y| y.is_nan()));
            assert!(product(1e-40, mode).iter().all(|y| y.abs() < 1e-38));
        }
        assert!(
            product(1e30, Mode::Int8)
                .iter()
                .any(|y| y.is_finite() && *y != 0.0)
        );
    }
}

#[test]
fn empty_tensors_and_wrong_sizes() {
    let pool = pool::current().unwrap();
    let spec: Spec = spec(3, 64, false);
    for mode in INTEGERS {
        for (experts, rows, columns) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
            let blob = case(experts, rows, columns, spec).blob;
            let view = View::parse(&blob).unwrap();
            let offsets: Vec<usize> = (0..=experts).collect();
            for isa in sets() {
                let y = products(&view, &activations(experts * columns), &offsets, mode, isa);
                assert!(y.iter().all(|&y| y == 0.0));
            }
        }
        let blob = case(2, 3, 64, spec).blob;
        let view = View::parse(&blob).unwrap();
        let weights = Groupwise::new(view, mode, Isa::SCALAR).unwrap();
        let x = activations(128);
        for (offsets, outputs) in [
            (vec![0, 2], 6),
            (vec![0, 2, 1], 6),
            (vec![0, 1, 2], 5),
            (vec![1, 1, 2], 6),
        ] {
            let mut y = vec![0.0; outputs];
            assert!(matmul_grouped(&weights, &x[..], &offsets, &mut y, &pool).is_err());
        }
        let mut y = vec![0.0; 6];
        assert!(matmul(&weights, 2, &x[..], 2, &mut y, &pool).is_err());
        assert!(matmul(&weights, 0, &x[..], 1, &mut y, &pool).is_err());
        assert!(Groupwise::new(view, Mode::Int16, Isa::SCALAR).is_err());
    }
}
