//! Every instruction set against the definition.

use half::bf16;

use super::*;
use crate::formats::coded::tests::Random;
use crate::pool;

const INTEGERS: usize = 63;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Lengths up to `most` bits, of 128 classes.
fn lengths(most: f32) -> Vec<f32> {
    let mut random = Random(3);
    let lengths = (0..128 * INTEGERS).map(|_| random.next() as f32 / (1u64 << 31) as f32 * most);
    lengths.collect()
}

/// Rows whose deviation grows by a factor of 16, with values on borders and far ones.
fn weights(rows: usize, columns: usize) -> Vec<f32> {
    let mut random = Random(7);
    let weights = (0..rows * columns).map(|i| {
        let weight = random.normal(16f32.powf((i / columns) as f32 / rows as f32));
        match random.next() % 64 {
            0 => weight.round() + 0.5,
            1 => weight * 40.0,
            _ => weight,
        }
    });
    weights.collect()
}

fn rounded(problem: Problem, isa: Isa) -> Result<Vec<i32>> {
    let pool = pool::current()?;
    Ok(match round(problem, isa, &pool)? {
        Integers::I8(found) => found.into_iter().map(i32::from).collect(),
        Integers::I16(found) => found.into_iter().map(i32::from).collect(),
        Integers::I32(found) => found,
    })
}

/// Row block by row block, value by value, by the rules of the module.
fn naive(problem: &Problem, weights: &[f32]) -> Vec<i32> {
    let mut found = Vec::new();
    for block in weights.chunks(BLOCK_ROWS * problem.columns) {
        let mut sums = vec![0.0; 16];
        for (i, &weight) in block.iter().enumerate() {
            sums[i % 16] += f64::from(weight) * f64::from(weight);
        }
        while sums.len() > 1 {
            let half = sums.split_off(sums.len() / 2);
            sums.iter_mut().zip(half).for_each(|(sum, other)| *sum += other);
        }
        let octaves = 0.5 * (sums[0] / block.len() as f64).log2() - problem.width.log2();
        let classes = problem.lengths.len() / problem.integers;
        let class = (4.0 * (octaves + 24.0))
            .round_ties_even()
            .clamp(0.0, (classes - 1) as f64) as usize;
        let bits = &problem.lengths[class * problem.integers..][..problem.integers];
        let (envelope, largest) = (
            Envelope::new(bits, problem.price),
            problem.integers as f32 / 2.0 - 0.5,
        );
        found.extend(block.iter().map(|&weight| {
            let unit = weight * (1.0 / problem.step) as f32;
            match unit.abs() <= largest {
                true => cheapest(bits, problem.price, unit, envelope.naive(unit)),
                false => unit.round_ties_even().min(MOST) as i32,
            }
        }));
    }
    found
}

/// What the envelope found, after a look at the costs of all integers.
fn cheapest(bits: &[f32], price: f64, unit: f32, found: i32) -> i32 {
    let largest = bits.len() as i32 / 2;
    let cost = |integer: i32| {
        let length = f64::from(bits[(integer + largest) as usize]);
        (f64::from(unit) - f64::from(integer)).powi(2) + price * length
    };
    let least = (-largest..=largest).map(cost).fold(f64::INFINITY, f64::min);
    assert!(
        cost(found) <= least + 1e-4 * (1.0 + least),
        "{unit} became {found}"
    );
    found
}

#[test]
fn every_instruction_set_takes_the_cheapest_integers() {
    for (rows, columns) in [(1, 1), (17, 3), (40, 300), (16, 257)] {
        let weights = weights(rows, columns);
        for (most, price) in [(12.0, 0.0), (12.0, 0.12), (12.0, 3.0), (0.0, 1.0)] {
            let lengths = lengths(most);
            for (classes, step, width) in [(128, 0.37, 1.0), (1, 1.0, 1.0), (128, 2.9, 0.013)] {
                let problem = Problem {
                    weights: weights[..].into(),
                    columns,
                    step,
                    width,
                    lengths: &lengths[..classes * INTEGERS],
                    integers: INTEGERS,
                    price,
                };
                let wanted = naive(&problem, &weights);
                for isa in isas() {
                    assert!(
                        rounded(problem, isa).unwrap() == wanted,
                        "{} {problem:?}",
                        isa.name()
                    );
                }
            }
        }
    }
}

fn plain<'a>(weights: Activations<'a>, columns: usize, lengths: &'a [f32]) -> Problem<'a> {
    Problem {
        weights,
        columns,
        step: 1.0,
        width: 1.0,
        lengths,
        integers: lengths.len(),
        price: 0.0,
    }
}

#[test]
fn bf16_and_f32_are_rounded_alike() {
    let bits: Vec<u16> = weights(20, 50)
        .iter()
        .map(|&w| bf16::from_f32(w).to_bits())
        .collect();
    let values: Vec<f32> = bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
    let lengths = [0.0; 31];
    for isa in isas() {
        let [a, b] = [Activations::Bf16(&bits), Activations::F32(&values)]
            .map(|weights| rounded(plain(weights, 50, &lengths), isa).unwrap());
        assert_eq!(a, b);
    }
}

#[test]
fn integers_take_the_narrowest_type() {
    let wide = |weights: &[f32]| {
        let isa = crate::simd::active().unwrap();
        round(
            plain(weights.into(), 2, &[0.0; 3]),
            isa,
            &pool::current().unwrap(),
        )
        .unwrap()
    };
    assert_eq!(wide(&[-127.4, 2.5]), Integers::I8(vec![-127, 2]));
    assert_eq!(wide(&[128.0, -32767.0]), Integers::I16(vec![128, -32767]));
    assert_eq!(
        wide(&[1e6, -f32::MAX]),
        Integers::I32(vec![1_000_000, -(1 << 30)])
    );
    assert_eq!(wide(&[]), Integers::I8(vec![]));
}

#[test]
fn bad_input_is_refused() {
    let ok = plain(Activations::F32(&[1.0, 2.0]), 2, &[0.0; 3]);
    let infinite = [1.0, f32::INFINITY];
    let bad = [
        Problem { columns: 3, ..ok },
        Problem { columns: 0, ..ok },
        Problem { integers: 2, ..ok },
        Problem { lengths: &[], ..ok },
        Problem { step: 0.0, ..ok },
        Problem { step: f64::NAN, ..ok },
        Problem { width: -1.0, ..ok },
        Problem {
            weights: Activations::F32(&[f32::NAN, 1.0]),
            ..ok
        },
        Problem {
            weights: Activations::F32(&infinite),
            ..ok
        },
    ];
    for problem in bad {
        assert!(rounded(problem, Isa::Scalar).is_err(), "{problem:?}");
    }
    assert!(rounded(ok, Isa::Scalar).is_ok());
}
