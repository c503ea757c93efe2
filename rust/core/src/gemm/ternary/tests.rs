//! Every kernel compared with decoded weights multiplied in f64.

use proptest::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::*;
use crate::formats::ternary::{TernaryView, decode_codes, encode};
use crate::gemm::{matmul, matmul_grouped};
use crate::types::{Mode, Shape};

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// A small random number generator, so that a failure can name its seed.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::all_available()
}

/// A packed tensor with the codes and levels of its weights.
struct Sample {
    blob: Vec<u8>,
    codes: Vec<i8>,
    levels: Vec<(f32, f32)>,
}

/// Rows of all kinds: zeros, one level only, dense ones (raw), and mixtures around `p0` in both directions of skew.
fn sample(shape: Shape, code: Code, p0: f64, seed: u64) -> Sample {
    let mut random = Random(seed);
    let rows = shape.experts * shape.rows;
    let mut codes = Vec::with_capacity(rows * shape.columns);
    for row in 0..rows {
        let (zero, share) = match row % 16 {
            3 => (1.0, 0.5),
            5 => (p0, 0.0),
            7 => (0.2, 0.5),
            9 => (p0, 0.8),
            11 => (p0, 0.2),
            13 => (1.0 - 0.5 * (1.0 - p0), 0.5),
            _ => (p0, 0.5),
        };
        codes.extend((0..shape.columns).map(|_| match random.unit() {
            u if u < zero => 0,
            u if u < zero + (1.0 - zero) * share => -1,
            _ => 1,
        }));
    }
    let levels: Vec<(f32, f32)> = (0..rows)
        .map(|_| (-(random.unit() as f32), random.unit() as f32))
        .collect();
    let blob = encode(&codes, &levels, shape, code, &pool(1)).unwrap();
    Sample { blob, codes, levels }
}

fn activations(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed ^ 0xac7);
    (0..n).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
}

/// Checks `y` (tokens x rows) of one expert against the definition, within the module's error bound.
fn check(sample: &Sample, shape: Shape, expert: usize, x: &[f32], y: &[f32], what: &str) {
    for (token, x) in x.chunks_exact(shape.columns).enumerate() {
        for row in 0..shape.rows {
            let all_row = expert * shape.rows + row;
            let codes = &sample.codes[all_row * shape.columns..][..shape.columns];
            let (negative, positive) = sample.levels[all_row];
            let (mut sum, mut magnitude, mut nonzeros) = (0.0, 0.0, 0.0);
            for (&code, &x) in codes.iter().zip(x).filter(|(code, _)| **code != 0) {
                let product = f64::from(if code < 0 { negative } else { positive }) * f64::from(x);
                sum += product;
                magnitude += product.abs();
                nonzeros += 1.0;
            }
            let unit = (nonzeros + 3.0) * 2f64.powi(-24);
            let bound = unit * magnitude / (1.0 - unit) + f64::from(f32::MIN_POSITIVE);
            let got = f64::from(y[token * shape.rows + row]);
            assert!(
                (got - sum).abs() <= bound,
                "{what}: token {token}, row {row}: {got} instead of {sum} +- {bound}"
            );
        }
    }
}

fn matrix(rows: usize, columns: usize) -> Shape {
    Shape {
        experts: 1,
        rows,
        columns,
        ndim: 2,
    }
}

fn weights<'a>(kernel: Kernel, view: &TernaryView<'a>) -> Ternary<'a> {
    Ternary::with_kernel(kernel, view.clone())
}

fn check_product(kernel: Kernel, shape: Shape, code: Code, p0: f64, tokens: usize) {
    let sample = sample(shape, code, p0, (shape.columns * 64 + tokens) as u64);
    let view = TernaryView::parse(&sample.blob).unwrap();
    let x = activations(tokens * shape.columns, tokens as u64);
    let mut y = vec![f32::NAN; tokens * shape.rows];
    matmul(&weights(kernel, &view), 0, &x[..], tokens, &mut y, &pool(1)).unwrap();
    let what = format!(
        "{} {} {shape:?} p0 {p0} tokens {tokens}",
        kernel.name(),
        code.name()
    );
    check(&sample, shape, 0, &x, &y, &what);
}

#[test]
fn products_match_decoded_weights_at_every_density() {
    for kernel in kernels() {
        for code in Code::ALL {
            for p0 in [
                0.0, 0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.885, 0.93, 0.96, 0.985, 1.0,
            ] {
                for tokens in [1, 2, 16] {
                    check_product(kernel, matrix(80, 403), code, p0, tokens);
                }
            }
        }
    }
}

#[test]
fn products_match_for_every_number_of_tokens() {
    for kernel in kernels() {
        for code in Code::ALL {
            for tokens in (1..=20).chain([31, 32, 33, 40, 48, 63, 64, 65, 100, 128, 129, 200]) {
                check_product(kernel, matrix(33, 257), code, 0.885, tokens);
            }
        }
    }
}

#[test]
fn products_match_for_every_shape() {
    for kernel in kernels() {
        for code in Code::ALL {
            for rows in [1, 2, 63, 64, 65, 130] {
                for columns in [1, 2, 3, 5, 15, 16, 17, 64, 255, 768, 2080, 6144] {
                    check_product(kernel, matrix(rows, columns), code, 0.885, 1);
                    check_product(kernel, matrix(rows, columns), code, 0.885, 5);
                }
            }
        }
    }
}

#[test]
fn wide_rows_match() {
    for kernel in kernels() {
        for code in Code::ALL {
            check_product(kernel, matrix(3, 70_001), code, 0.885, 1);
            check_product(kernel, matrix(3, 70_001), code, 0.97, 3);
        }
    }
}

#[test]
fn empty_shapes_give_zeros() {
    for kernel in kernels() {
        for (rows, columns) in [(0, 0), (0, 5), (5, 0)] {
            let sample = sample(matrix(rows, columns), Code::Fsv8, 0.9, 0);
            let view = TernaryView::parse(&sample.blob).unwrap();
            let mut y = vec![f32::NAN; 3 * rows];
            let x = vec![1.0f32; 3 * columns];
            matmul(&weights(kernel, &view), 0, &x[..], 3, &mut y, &pool(1)).unwrap();
            assert_eq!(y, vec![0.0; 3 * rows]);
        }
    }
}

#[test]
fn bf16_activations_equal_their_f32_values() {
    let shape = matrix(70, 300);
    let sample = sample(shape, Code::Fsv8, 0.885, 1);
    let view = TernaryView::parse(&sample.blob).unwrap();
    for tokens in [1, 4, 17] {
        let bits: Vec<u16> = activations(tokens * 300, 2)
            .into_iter()
            .map(|x| half::bf16::from_f32(x).to_bits())
            .collect();
        let x: Vec<f32> = bits.iter().map(|&b| half::bf16::from_bits(b).to_f32()).collect();
        for kernel in kernels() {
            let (mut narrow, mut wide) = (vec![0.0; tokens * 70], vec![1.0; tokens * 70]);
            let weights = weights(kernel, &view);
            matmul(&weights, 0, &bits[..], tokens, &mut narrow, &pool(1)).unwrap();
            matmul(&weights, 0, &x[..], tokens, &mut wide, &pool(1)).unwrap();
            assert_eq!(narrow, wide);
        }
    }
}

fn stack() -> (Shape, Vec<usize>) {
    let shape = Shape {
        experts: 6,
        rows: 150,
        columns: 210,
        ndim: 3,
    };
    (shape, vec![0, 1, 1, 20, 22, 100, 107])
}

#[test]
fn grouped_products_serve_each_expert_its_tokens() {
    let (shape, offsets) = stack();
    for code in Code::ALL {
        let sample = sample(shape, code, 0.9, 5);
        let view = TernaryView::parse(&sample.blob).unwrap();
        let x = activations(107 * shape.columns, 6);
        for kernel in kernels() {
            let mut y = vec![f32::NAN; 107 * shape.rows];
            matmul_grouped(&weights(kernel, &view), &x[..], &offsets, &mut y, &pool(2)).unwrap();
            for expert in 0..shape.experts {
                let tokens = offsets[expert]..offsets[expert + 1];
                let x = &x[tokens.start * shape.columns..tokens.end * shape.columns];
                let y = &y[tokens.start * shape.rows..tokens.end * shape.rows];
                check(&sample, shape, expert, x, y, kernel.name());
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_or_on_grouping() {
    let (shape, offsets) = stack();
    let sample = sample(shape, Code::Fsv8, 0.885, 7);
    let view = TernaryView::parse(&sample.blob).unwrap();
    let x = activations(107 * shape.columns, 8);
    for kernel in kernels() {
        let mut reference = vec![0.0; 107 * shape.rows];
        matmul_grouped(
            &weights(kernel, &view),
            &x[..],
            &offsets,
            &mut reference,
            &pool(1),
        )
        .unwrap();
        for threads in [2, 3, 8] {
            let mut y = vec![1.0; 107 * shape.rows];
            matmul_grouped(&weights(kernel, &view), &x[..], &offsets, &mut y, &pool(threads)).unwrap();
            assert_eq!(y, reference);
        }
        let tokens = offsets[2]..offsets[3];
        let mut alone = vec![0.0; tokens.len() * shape.rows];
        let x = &x[tokens.start * shape.columns..tokens.end * shape.columns];
        matmul(&weights(kernel, &view), 2, x, tokens.len(), &mut alone, &pool(2)).unwrap();
        assert_eq!(
            alone,
            reference[tokens.start * shape.rows..tokens.end * shape.rows]
        );
    }
}

/// The order of loads depends on the processor; outputs of one token must not.
#[test]
fn all_vector_kernels_give_one_token_the_same_bits() {
    for code in Code::ALL {
        for (p0, columns) in [(0.6, 300), (0.885, 2080), (0.885, 6144)] {
            let shape = matrix(70, columns);
            let sample = sample(shape, code, p0, 9);
            let view = TernaryView::parse(&sample.blob).unwrap();
            let x = activations(columns, 10);
            let outputs: Vec<Vec<u32>> = kernels()
                .filter(|&kernel| kernel != Kernel::SCALAR)
                .map(|kernel| {
                    let mut y = vec![0.0; 70];
                    matmul(&weights(kernel, &view), 0, &x[..], 1, &mut y, &pool(1)).unwrap();
                    y.into_iter().map(f32::to_bits).collect()
                })
                .collect();
            assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]));
        }
    }
}

#[test]
fn arguments_are_checked() {
    let (shape, offsets) = stack();
    let sample = sample(shape, Code::Fsv8, 0.9, 5);
    let view = TernaryView::parse(&sample.blob).unwrap();
    let weights = Ternary::new(view.clone(), Mode::Auto, Isa::SCALAR).unwrap();
    let pool = pool(1);
    let (x, mut y) = (vec![0.0f32; 107 * 210], vec![0.0; 107 * 150]);
    let grouped =
        |x: &[f32], offsets: &[usize], y: &mut [f32]| matmul_grouped(&weights, x, offsets, y, &pool).is_ok();
    assert!(grouped(&x, &offsets, &mut y));
    assert!(!grouped(&x[1..], &offsets, &mut y));
    assert!(!grouped(&x, &offsets, &mut y[1..]));
    assert!(!grouped(&x, &offsets[1..], &mut y));
    assert!(!grouped(&x, &[0, 2, 1, 20, 22, 100, 107], &mut y));
    assert!(!grouped(&x, &[1, 1, 1, 20, 22, 100, 107], &mut y));
    assert!(!grouped(&x, &[0, 1, 1, 20, 22, 100, 108], &mut y));
    assert!(matmul(&weights, 6, &x[..210], 1, &mut y[..150], &pool).is_err());
    assert!(matmul(&weights, 0, &x[..211], 1, &mut y[..150], &pool).is_err());
    assert!(matmul(&weights, 0, &x[..210], 1, &mut y[..149], &pool).is_err());
    assert!(matmul(&weights, 0, &x[..210], 2, &mut y[..150], &pool).is_err());
    assert!(matmul(&weights, 0, &x[..210], usize::MAX, &mut y[..150], &pool).is_err());
    assert!(Ternary::new(view, Mode::Int8, Isa::SCALAR).is_err());
}

#[test]
fn every_instruction_set_names_a_kernel_that_it_runs() {
    for (isa, code) in Isa::all_available().flat_map(|isa| Code::ALL.map(|code| (isa, code))) {
        let kernel = kernel_for(code, isa);
        assert!(kernel.isa().kind() <= isa.kind());
        assert!(kernels().any(|available| available == kernel));
    }
}

#[test]
fn samples_match_their_codes_and_levels() {
    let shape = matrix(80, 403);
    for code in Code::ALL {
        let sample = sample(shape, code, 0.885, 3);
        let view = TernaryView::parse(&sample.blob).unwrap();
        let mut codes = vec![9; sample.codes.len()];
        decode_codes(&view, &mut codes, &pool(1)).unwrap();
        assert_eq!(codes, sample.codes);
        if code == Code::Fsv8 {
            let rows: Vec<_> = (0..80).map(|row| view.row(0, row)).collect();
            let any = |f: fn(&crate::formats::ternary::Row) -> bool| rows.iter().any(f);
            assert!(any(|row| matches!(row, crate::formats::ternary::Row::Zero)));
            assert!(any(|row| matches!(row, crate::formats::ternary::Row::Raw(_))));
            assert!(any(|row| matches!(
                row,
                crate::formats::ternary::Row::Fsv8 { swapped: true, .. }
            )));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Damage anywhere after the header is rejected by parsing, or every kernel gives some numbers.
    #[test]
    fn damaged_tensors_give_numbers_and_no_faults(
        seed in any::<u64>(),
        p0 in prop::sample::select(vec![0.5, 0.8, 0.885, 0.96]),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u32), 1..40),
        dense in any::<bool>(),
        code in prop::sample::select(Code::ALL.to_vec()),
        tokens in prop::sample::select(vec![1, 3, 16, 70]),
    ) {
        let shape = matrix(70, 200);
        let mut blob = sample(shape, code, p0, seed).blob;
        let payload = blob.len() - TernaryView::parse(&blob).unwrap().padded_payload().len();
        for (place, bit) in flips {
            let at = payload + place.index(blob.len() - payload);
            blob[at] ^= 1 << bit;
        }
        if dense {
            blob[payload..].fill(seed as u8);
        }
        let Ok(view) = TernaryView::parse(&blob) else { return Ok(()) };
        let x = vec![1.0f32; tokens * 200];
        for kernel in kernels() {
            let mut y = vec![f32::NAN; tokens * 70];
            matmul(&weights(kernel, &view), 0, &x[..], tokens, &mut y, &pool(1)).unwrap();
            prop_assert!(y.iter().all(|y| y.abs() <= 200.0 * 4.0));
        }
    }
}
