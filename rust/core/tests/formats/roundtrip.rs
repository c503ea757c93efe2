//! Encoding and decoding: encoded tensors parse, verify and decode to the same codes and levels.

use moepack_core::formats::ternary::{self, Code, Row, TernaryView, fsv8};
use moepack_core::pool;
use moepack_core::types::Shape;
use proptest::prelude::*;

/// A row of one of the kinds that encoders treat differently.
fn row(columns: usize) -> impl Strategy<Value = Vec<i8>> {
    let iid = (0.0..=1.0f64, 0.0..=1.0f64).prop_flat_map(move |(p0, share)| {
        prop::collection::vec(0.0..1.0f64, columns).prop_map(move |draws| {
            let code = |u: f64| match u {
                _ if u < p0 => 0,
                _ if u < p0 + (1.0 - p0) * share => -1,
                _ => 1,
            };
            draws.into_iter().map(code).collect()
        })
    });
    let constant = (-1..=1i8).prop_map(move |code| vec![code; columns]);
    let single = (0..columns.max(1), prop::bool::ANY).prop_map(move |(at, positive)| {
        let mut codes = vec![0; columns];
        codes
            .iter_mut()
            .skip(at)
            .take(1)
            .for_each(|code| *code = if positive { 1 } else { -1 });
        codes
    });
    prop_oneof![6 => iid, 1 => constant, 1 => single]
}

/// Codes and levels of a whole tensor.
fn tensor() -> impl Strategy<Value = (Shape, Vec<i8>, Vec<(f32, f32)>)> {
    (0..4usize, 0..80usize, prop_oneof![0..8usize, 8..300usize]).prop_flat_map(|(experts, rows, columns)| {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        let codes = prop::collection::vec(row(columns), experts * rows).prop_map(|rows| rows.concat());
        let level = prop_oneof![Just(0.0f32), 1e-3..2.0f32, Just(0.5f32)];
        let independent = prop::collection::vec((level.clone(), level.clone()), experts * rows)
            .prop_map(|pairs| pairs.into_iter().map(|(a, b)| (-a, b)).collect());
        let opposite = prop::collection::vec(level, experts * rows)
            .prop_map(|levels| levels.into_iter().map(|b| (0.0 - b, b)).collect());
        (Just(shape), codes, prop_oneof![independent, opposite])
    })
}

fn round_trip(shape: Shape, codes: &[i8], levels: &[(f32, f32)], code: Code) -> Vec<u8> {
    let pool = pool::current().unwrap();
    let blob = ternary::encode(codes, levels, shape, code, &pool).unwrap();
    let view = TernaryView::parse(&blob).unwrap();
    view.verify(&pool).unwrap();
    assert_eq!((view.shape(), view.code()), (shape, code));
    assert_eq!(
        view.nonzeros(),
        codes.iter().filter(|&&code| code != 0).count() as u64
    );
    let mut decoded = vec![9; codes.len()];
    ternary::decode_codes(&view, &mut decoded, &pool).unwrap();
    assert!(decoded == codes);
    for (row, &expected) in levels.iter().enumerate() {
        assert_eq!(view.levels(row), expected);
    }
    assert_eq!(blob.len() % 64, 0);
    blob
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn tensors_survive((shape, codes, levels) in tensor(), code in prop::sample::select(&Code::ALL[..])) {
        round_trip(shape, &codes, &levels, code);
    }
}

/// Reproducible draws from 0 to 1: SplitMix64.
fn draws(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 11) as f64 * 2f64.powi(-53)
    }
}

/// `n` independent codes: `p0` of them zero, `share` of the others negative.
fn iid(n: usize, p0: f64, share: f64, seed: u64) -> Vec<i8> {
    let mut draw = draws(seed);
    let code = |u: f64| match u {
        _ if u < p0 => 0,
        _ if u < p0 + (1.0 - p0) * share => -1,
        _ => 1,
    };
    (0..n).map(|_| code(draw())).collect()
}

fn matrix(rows: usize, columns: usize) -> Shape {
    Shape {
        experts: 1,
        rows,
        columns,
        ndim: 2,
    }
}

#[test]
fn wide_rows_survive_on_both_sides_of_the_wide_tail() {
    for columns in [16_380, 16_381, 70_001] {
        let rows = [(0.885, 0.5), (0.3, 0.5), (1.0, 0.5), (0.0, 1.0), (0.99, 0.1)];
        let codes: Vec<i8> = rows
            .iter()
            .flat_map(|&(p0, share)| iid(columns, p0, share, 3))
            .collect();
        for code in Code::ALL {
            round_trip(matrix(5, columns), &codes, &[(-1.0, 1.0); 5], code);
        }
    }
}

#[test]
fn no_row_takes_more_than_two_bits_per_weight() {
    for (p0, columns) in [(0.0, 1001), (0.2, 64), (0.45, 7), (0.4, 3)] {
        let codes = iid(100 * columns, p0, 0.5, 9);
        let blob = round_trip(matrix(100, columns), &codes, &[(-1.0, 1.0); 100], Code::Fsv8);
        let view = TernaryView::parse(&blob).unwrap();
        assert!(view.payload_bytes() <= 100 * columns.div_ceil(4));
        assert!((0..100).any(|row| matches!(view.row(0, row), Row::Raw(_))));
    }
}

#[test]
fn rows_of_a_group_match_single_rows() {
    let codes = iid(2 * 130 * 50, 0.8, 0.3, 5);
    let shape = Shape {
        experts: 2,
        rows: 130,
        columns: 50,
        ndim: 3,
    };
    for code in Code::ALL {
        let blob = round_trip(shape, &codes, &[(-1.0, 1.0); 260], code);
        let view = TernaryView::parse(&blob).unwrap();
        for expert in 0..2 {
            let rows: Vec<_> = (0..view.groups())
                .flat_map(|group| view.group_rows(expert, group))
                .collect();
            assert_eq!(rows.len(), 130);
            for (row, placed) in rows.iter().enumerate() {
                assert_eq!((placed.row, placed.codes), (row, view.row(expert, row)));
                let stored = &view.padded_payload()[placed.start..][..placed.codes.bytes().len()];
                assert_eq!(stored, placed.codes.bytes());
            }
        }
    }
}

#[test]
fn unlike_rows_choose_unlike_dictionaries_and_swap_levels() {
    let kinds = [
        (0.5, 0.5),
        (0.7, 0.8),
        (0.8, 0.2),
        (0.885, 0.5),
        (0.92, 0.75),
        (0.97, 0.3),
    ];
    let codes: Vec<i8> = (0..96)
        .flat_map(|i| iid(2000, kinds[i % 6].0, kinds[i % 6].1, i as u64))
        .collect();
    let blob = round_trip(matrix(96, 2000), &codes, &[(-1.0, 1.0); 96], Code::Fsv8);
    let view = TernaryView::parse(&blob).unwrap();
    assert!(view.dictionaries().len() >= 5);
    for row in 0..96 {
        let Row::Fsv8 { swapped, .. } = view.row(0, row) else {
            panic!("row {row} is not coded")
        };
        match kinds[row % 6].1 {
            share if share > 0.6 => assert!(!swapped),
            share if share < 0.4 => assert!(swapped),
            _ => (),
        }
    }
}

#[test]
fn every_embedded_dictionary_codes_every_row() {
    let mut out = vec![0; 2000];
    for (id, dictionary) in fsv8::Dictionary::all().iter().enumerate() {
        let (encoder, lut) = (fsv8::Encoder::embedded(id), fsv8::Lut::embedded(id));
        for seed in 0..60 {
            let columns = 1 + (seed as usize * 37) % 700;
            let p0 = if seed % 2 == 0 {
                dictionary.probabilities()[0]
            } else {
                seed as f64 / 60.0
            };
            let codes = iid(columns, p0, 0.6, seed);
            let mut nonzeros: Vec<u32> = (0..columns)
                .filter(|&i| codes[i] != 0)
                .map(|i| (i as u32) << 1 | u32::from(codes[i] > 0))
                .collect();
            nonzeros.extend([fsv8::SENTINEL; 2]);
            let length = encoder.encode(&nonzeros, columns as u32, 0, &mut out);
            assert_eq!(
                decode(&out[..length], lut, columns),
                codes,
                "dictionary {id}, seed {seed}"
            );
        }
    }
}

/// Decodes with a simple loop over a lookup table.
fn decode(codes: &[u8], lut: &fsv8::Lut, columns: usize) -> Vec<i8> {
    let (mut row, mut at, mut previous) = (vec![0; columns], 0, 0);
    for &code in codes {
        let index = lut.index(code, previous);
        assert!(lut.possible(index));
        for (position, symbol) in fsv8::lut::nonzeros(lut.entries[index], lut.three_slots) {
            row[at + position] = if symbol == 1 { -1 } else { 1 };
        }
        at += (lut.entries[index] >> 24) as usize;
        previous = code;
    }
    assert!(at >= columns && lut.ends_row(previous));
    row
}

#[test]
fn independent_weights_reach_the_ratios_of_the_specification() {
    for (code, least) in [(Code::Fsv8, 24.4), (Code::Dict16, 21.0)] {
        let mut packed = 0;
        for (rows, columns) in [(2080, 6144), (6144, 2080)] {
            let codes = iid(rows * columns, 0.885, 0.5, 11);
            packed += round_trip(matrix(rows, columns), &codes, &vec![(-1.0, 1.0); rows], code).len();
        }
        let ratio = (2.0 * 2.0 * 2080.0 * 6144.0) / packed as f64;
        assert!(ratio >= least, "{}: {ratio}", code.name());
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_byte() {
    let codes = iid(5 * 150 * 333, 0.85, 0.4, 2);
    let shape = Shape {
        experts: 5,
        rows: 150,
        columns: 333,
        ndim: 3,
    };
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        Code::ALL.map(|code| ternary::encode(&codes, &vec![(-0.5, 0.25); 750], shape, code, &pool).unwrap())
    };
    let one = with(1);
    assert!(with(2) == one && with(7) == one);
}

#[test]
fn arguments_out_of_range_are_refused() {
    let pool = pool::current().unwrap();
    let refused = |codes: &[i8], levels: &[(f32, f32)], shape: Shape| {
        for code in Code::ALL {
            let error = ternary::encode(codes, levels, shape, code, &pool).unwrap_err();
            assert!(
                matches!(error, moepack_core::Error::InvalidArgument(_)),
                "{error}"
            );
        }
    };
    let good = [(-1.0, 1.0); 2];
    refused(&[0; 5], &good, matrix(2, 3));
    refused(&[0; 6], &good[..1], matrix(2, 3));
    refused(&[0, 0, 0, 0, 0, 2], &good, matrix(2, 3));
    refused(
        &[0; 6],
        &good,
        Shape {
            ndim: 1,
            ..matrix(2, 3)
        },
    );
    refused(
        &[0; 6],
        &good,
        Shape {
            experts: 2,
            rows: 1,
            columns: 3,
            ndim: 2,
        },
    );
    refused(
        &[],
        &[],
        Shape {
            experts: 0,
            rows: 1,
            columns: usize::MAX,
            ndim: 3,
        },
    );
    for bad in [(1.0, 1.0), (-1.0, -1.0), (f32::NAN, 1.0), (-1.0, f32::INFINITY)] {
        refused(&[0; 6], &[good[0], bad], matrix(2, 3));
    }
}
