//! Tensors of every format and shape verify and decode, and the kernels of all instruction sets agree, as the targets
//! check for valid bytes.

use moepack_core::Result;
use moepack_core::formats::groupwise::{self, ParameterType, Spec};
use moepack_core::formats::{codebook, coded, compensated, ternary};
use moepack_core::types::Shape;
use moepack_fuzz::{kernel_twins, pool, tensor_read};
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = Shape> {
    let stack = |(experts, rows, columns)| Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    };
    (0..3usize, 0..40usize, 0..150usize).prop_map(stack)
}

/// Pseudo-random numbers below a limit.
fn noise(seed: u32) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |limit| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % limit
    }
}

fn many<T>(count: usize, make: impl FnMut() -> T) -> Vec<T> {
    std::iter::repeat_with(make).take(count).collect()
}

/// A number that every parameter type represents exactly.
fn parameter(next: &mut impl FnMut(u32) -> u32) -> f32 {
    next(64) as f32 / 256.0 - 0.125
}

fn grid(shape: Shape, bits: u8, group: usize, symmetric: bool, seed: u32) -> Result<Vec<u8>> {
    let (rows, mut next) = (shape.experts * shape.rows, noise(seed));
    let groups = if group == 0 {
        1
    } else {
        shape.columns.div_ceil(group)
    };
    let spec = Spec {
        bits,
        group,
        symmetric,
        parameters: ParameterType::F16,
    };
    let codes = many(rows * shape.columns, || next(1 << bits) as u8);
    let groups = if shape.columns == 0 { 0 } else { groups };
    let scales = many(rows * groups, || parameter(&mut next));
    let offsets = many(rows * groups, || parameter(&mut next));
    groupwise::encode(
        &codes,
        &scales,
        (!symmetric).then_some(&offsets[..]),
        shape,
        spec,
        pool(),
    )
}

fn factor(rows: usize, length: usize, bits: u8, next: &mut impl FnMut(u32) -> u32) -> (Vec<u8>, Vec<f32>) {
    let codes = many(rows * length, || next(1 << bits.min(8)) as u8);
    (codes, many(rows * length.div_ceil(64), || parameter(next)))
}

fn check(packed: Result<Vec<u8>>) {
    let packed = packed.expect("it is packed");
    tensor_read::read(&packed).expect("it is read");
    kernel_twins::read(&packed).expect("it is multiplied");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn ternary(shape in shapes(), zeros in 1..30u32, seed: u32) {
        let mut next = noise(seed);
        let codes = many(shape.weights().unwrap(), || [-1, 1].get(next(zeros + 2) as usize).copied().unwrap_or(0i8));
        let levels = many(shape.experts * shape.rows, || (-parameter(&mut next).abs(), 0.5));
        for code in ternary::Code::ALL {
            check(ternary::encode(&codes, &levels, shape, code, pool()));
        }
    }

    #[test]
    fn groups(shape in shapes(), bits in prop::sample::select(vec![2u8, 3, 4, 8]),
              group in prop::sample::select(vec![0usize, 16, 64, 128]), symmetric: bool, seed: u32) {
        check(grid(shape, bits, group, symmetric, seed));
    }

    #[test]
    fn factors(shape in shapes(), width in prop::sample::select(vec![3u8, 8]), rank in 0..6usize, seed: u32) {
        let mut next = noise(seed);
        let ranks = vec![rank.min(shape.rows).min(shape.columns); shape.experts];
        let total = ranks.iter().sum();
        let base = grid(shape, 3, 64, false, seed).expect("it is packed");
        let [right, left] = [shape.columns, shape.rows].map(|length| factor(total, length, width, &mut next));
        let [right, left] = [&right, &left].map(|(codes, scales)| compensated::Factor::Codes { codes, scales });
        check(compensated::encode(&base, &ranks, right, left, compensated::chunk::Width::from_bits(width).unwrap()));
    }

    #[test]
    fn codebooks(shape in shapes(), bits in 2..5u8, rounded: bool, seed: u32) {
        let mut next = noise(seed);
        let books = shape.experts * shape.rows * shape.columns.div_ceil(128);
        let centroids = many(books << bits, || 256 * (next(255) as i16 - 127));
        let content = codebook::Content {
            shape, bits, activation_bits: 8 * u8::from(rounded), block: 128, hadamard: 1,
            codes: &many(shape.weights().unwrap(), || next(1 << bits) as u8),
            centroids: &centroids,
            scales: &many(books, || next(1000) as f32 / 1e6),
        };
        check(codebook::encode(content, pool()));
    }

    #[test]
    fn integers(
        shape in shapes(),
        spread in 1..500u32,
        rows: bool,
        columns in prop_oneof![Just(None), Just(Some(false)), Just(Some(true))],
        low_bits in 0..=coded::MAX_LOW_BITS,
        seed: u32,
    ) {
        let mut next = noise(seed);
        let codes = many(shape.weights().unwrap(), || (next(spread) + next(spread)) as i32 - spread as i32);
        let rows = many(if rows { shape.experts * shape.rows } else { 1 }, || parameter(&mut next));
        let experts = |own| if own { shape.experts } else { 1 };
        let columns = columns.map(|own| many(experts(own) * shape.columns, || parameter(&mut next)));
        let scales = coded::Scales { rows: &rows, columns: columns.as_deref() };
        // Codes of more than eight bits are not decoded to bytes.
        let symbols = coded::Symbols::Plain { low_bits };
        let packed = coded::encode(&codes, scales, shape, None, symbols, pool()).expect("it is packed");
        kernel_twins::read(&packed).expect("it is multiplied");
    }

    #[test]
    fn dependent_integers(shape in shapes(), spread in 1..15u32, seed: u32) {
        let mut next = noise(seed);
        let codes = many(shape.weights().unwrap() / shape.columns.max(1), || {
            let mut states = [0; coded::QUAD];
            many(shape.columns, || (next(spread) + next(spread)) as i32 - spread as i32)
                .into_iter()
                .enumerate()
                .map(|(column, index)| {
                    let state = &mut states[column % coded::QUAD];
                    let sign = 1 - 2 * (*state as i32 % 2);
                    *state = coded::trellis::NEXT[2 * *state + (index & 1) as usize].into();
                    sign * (4 * index + 1)
                })
                .collect::<Vec<_>>()
        });
        let symbols = coded::Symbols::Dependent;
        let packed = coded::encode(&codes.concat(), &[0.5], shape, None, symbols, pool()).expect("it is packed");
        kernel_twins::read(&packed).expect("it is multiplied");
    }
}
