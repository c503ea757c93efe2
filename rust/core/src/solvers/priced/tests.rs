//! Every instruction set compared with the definition.

use std::collections::BTreeMap;

use half::bf16;

use super::*;
use crate::formats::coded::tests::Random;
use crate::pool;

const INTEGERS: usize = 63;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

/// Lengths up to `most` bits, for 128 classes.
fn lengths(most: f32) -> Vec<f32> {
    let mut random = Random(3);
    let lengths = (0..128 * INTEGERS).map(|_| random.next() as f32 / (1u64 << 31) as f32 * most);
    lengths.collect()
}

/// Rows whose deviation grows by a factor of 16, including values on borders and outliers.
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
    let mut found = vec![0; problem.weights.len()];
    round(problem, &mut found, isa, &*pool::current()?)?;
    Ok(found)
}

/// Rounds by the rules of the module, one value at a time.
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

/// Asserts that the integer found has the lowest cost of all.
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
fn bf16_and_f32_are_rounded_identically() {
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
fn the_largest_magnitude_is_returned_and_narrow_types_keep_low_bits() {
    let weights = [-127.4, 2.5, 128.0, -32767.0, 1e6, -f32::MAX];
    let (isa, pool) = (crate::simd::active().unwrap(), pool::current().unwrap());
    for (count, largest) in [(2, 127), (4, 32767), (5, 1_000_000), (6, 1 << 30), (0, 0)] {
        let problem = plain(weights[..count].into(), 1, &[0.0; 3]);
        let (mut narrow, mut wide) = (vec![0i8; count], vec![0i32; count]);
        assert_eq!(round(problem, &mut narrow, isa, &pool), Ok(largest));
        assert_eq!(round(problem, &mut wide, isa, &pool), Ok(largest));
        assert_eq!(wide, [-127, 2, 128, -32767, 1_000_000, -(1 << 30)][..count]);
        assert!(
            narrow
                .iter()
                .zip(&wide)
                .all(|(&narrow, &wide)| narrow == wide as i8)
        );
    }
    assert!(
        round(
            plain(weights[..2].into(), 1, &[0.0; 3]),
            &mut [0i8; 3],
            isa,
            &pool
        )
        .is_err()
    );
}

#[test]
fn counts_match_every_value() {
    const BINS: usize = 64;
    let (columns, classes, pool) = (33, 128, pool::current().unwrap());
    let weights = weights(50, columns);
    let integers: Vec<i16> = weights.iter().map(|weight| weight.round() as i16).collect();
    let rows = count::Rows {
        values: &weights,
        columns,
        classes,
    };
    let (mut places, mut sizes) = (BTreeMap::new(), BTreeMap::new());
    for (weights, integers) in weights.chunks(16 * columns).zip(integers.chunks(16 * columns)) {
        let squares: f64 = weights.iter().map(|&weight| f64::from(weight).powi(2)).sum();
        let class = (4.0 * (0.5 * (squares / weights.len() as f64).log2() + 24.0)).round();
        let places = places.entry(class as usize).or_insert(vec![0; BINS]);
        let sizes = sizes.entry(class as usize).or_insert(vec![0; 9]);
        for (&weight, &integer) in weights.iter().zip(integers) {
            let unit = f64::from(weight) / (class / 4.0 - 24.0).exp2();
            let place = (unit * BINS as f64 / 4.0 + BINS as f64 / 2.0).clamp(0.0, BINS as f64 - 1.0);
            places[place as usize] += 1;
            sizes[(integer.clamp(-4, 4) + 4) as usize] += 1;
        }
    }
    let (places, sizes): (count::Counts, count::Counts) =
        (places.into_iter().collect(), sizes.into_iter().collect());
    for isa in isas() {
        assert_eq!(count::values(rows, BINS, 2.0, isa, &pool).unwrap(), places);
        assert_eq!(count::integers(rows, &integers, 3, isa, &pool).unwrap(), sizes);
    }
    assert!(count::integers(rows, &integers[1..], 3, isas().next().unwrap(), &pool).is_err());
    for bad in [
        count::Rows { columns: 7, ..rows },
        count::Rows { classes: 0, ..rows },
    ] {
        assert!(count::values(bad, BINS, 2.0, isas().next().unwrap(), &pool).is_err());
    }
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
        assert!(rounded(problem, Isa::SCALAR).is_err(), "{problem:?}");
    }
    assert!(rounded(ok, Isa::SCALAR).is_ok());
}
