//! Round trips of GPU layouts for all kinds of tensors.

use proptest::prelude::*;

use super::super::{Coded, Scales, Symbols, encode};
use super::restore::*;
use super::*;
use crate::formats::coded::tests::{Random, dependent, encoded, encoded_dependent, gaussian, matrix};
use crate::pool;
use crate::types::Shape;

fn laid_out(data: &[u8], of_segment: Option<usize>) -> Vec<u8> {
    let coded = Coded::parse(data).unwrap();
    let pool = pool::current().unwrap();
    coded.view(data).unwrap().to_device(of_segment, &pool).unwrap()
}

fn restored(data: &[u8]) -> Result<Vec<u8>> {
    from_device(data, &pool::current().unwrap())
}

/// Tensors of these codes with and without column scales, and of the dependent codes with these indices.
fn all(codes: &[i32], shape: Shape, stream_rows: Option<usize>) -> [Vec<u8>; 4] {
    let (paths, pool) = (dependent(codes, shape.columns), pool::current().unwrap());
    let columns: Vec<f32> = (0..shape.experts * shape.columns)
        .map(|i| i as f32 / 8.0)
        .collect();
    let scaled = [&columns[..shape.columns.min(columns.len())], &columns].map(|columns| {
        let scales = Scales {
            rows: &[0.5],
            columns: Some(columns),
        };
        encode(codes, scales, shape, stream_rows, Symbols::PLAIN, &pool).unwrap()
    });
    let [shared, own] = scaled;
    [
        encoded(codes, shape, stream_rows),
        encoded_dependent(&paths, shape, stream_rows),
        shared,
        own,
    ]
}

#[test]
fn layouts_hold_scales_of_columns_in_f32() {
    let shape = Shape {
        experts: 2,
        rows: 5,
        columns: 3,
        ndim: 3,
    };
    for (data, wanted) in all(&[1; 30], shape, None).iter().zip([0, 0, 1, 2]) {
        let layout = laid_out(data, None);
        let word = |i: usize| u64::from_le_bytes(layout.as_chunks().0[i]) as usize;
        let section = layout[word(12)..][..word(13)].as_chunks().0;
        let found: Vec<f32> = section.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        assert_eq!(found.len(), wanted * GROUP);
        for (row, scales) in found.chunks(GROUP).enumerate() {
            let own = (3 * row..3 * row + 3).map(|i| i as f32 / 8.0);
            assert!(scales.iter().copied().eq(own.chain([0.0; GROUP - 3])));
        }
    }
}

#[test]
fn layouts_round_trip() {
    for (experts, rows, columns) in [
        (1, 1, 1),
        (2, 17, 130),
        (3, 79, 256),
        (1, 64, 1030),
        (2, 33, 777),
        (0, 3, 4),
        (2, 0, 4),
        (2, 3, 0),
    ] {
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: 3,
        };
        for (stream_rows, deviation) in [(16, 3.0), (64, 0.2), (64, 12.0)] {
            for data in all(&gaussian(shape, deviation, 1), shape, Some(stream_rows)) {
                for of_segment in [None, Some(1), Some(3)] {
                    assert!(
                        restored(&laid_out(&data, of_segment)).unwrap() == data,
                        "{shape:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn records_tell_in_which_quads_lanes_are_in_odd_states() {
    // From state 5, even indices lead to 4, 2, 1; from state 6, to 3, 6, 3.
    assert_eq!(path_byte([5, 0]), 0b0100_0001);
    assert_eq!(path_byte([0, 6]), 0b1000_1000);
}

#[test]
fn differences_are_sums_of_halves() {
    for difference in [
        1,
        -1,
        31,
        1023,
        1024,
        -2047,
        2049,
        65535,
        -1_000_001,
        i32::MAX,
        i32::MIN,
    ] {
        let parts = halves(difference).map(|half| half::f16::from_bits(half).to_f64() * f64::from(1 << 24));
        assert_eq!(parts.sum::<f64>(), f64::from(difference));
        assert!(halves(difference).count() <= 3);
    }
}

#[test]
fn arguments_out_of_range_are_refused() {
    let data = encoded(&[1; 6], matrix(2, 3), None);
    let coded = Coded::parse(&data).unwrap();
    for of_segment in [0, 17] {
        let made = coded
            .view(&data)
            .unwrap()
            .to_device(Some(of_segment), &pool::current().unwrap());
        assert!(matches!(made, Err(crate::Error::InvalidArgument(_))));
    }
}

#[test]
fn damaged_layouts_are_refused_or_harmless() {
    let shape = matrix(40, 300);
    let mut random = Random(1);
    for data in all(&gaussian(shape, 2.0, 9), shape, None).map(|data| laid_out(&data, None)) {
        for _ in 0..500 {
            let mut bad = data.clone();
            let place = random.next() as usize % bad.len();
            bad[place] ^= 1 << (random.next() % 8);
            let _ = restored(&bad);
        }
        for end in (0..data.len()).step_by(97) {
            let _ = restored(&data[..end]);
        }
    }
}

proptest! {
    #[test]
    fn any_stream_becomes_lanes_and_back(
        rows in 1usize..70,
        columns in 1usize..600,
        wide: bool,
        of_segment in 1usize..4,
        spread in 1i32..2000,
        seed: u64,
    ) {
        let shape = matrix(rows, columns);
        let mut random = Random(seed);
        let codes: Vec<i32> = (0..rows * columns).map(|_| random.next() as i32 % spread).collect();
        for data in all(&codes, shape, Some(if wide { 64 } else { 16 })) {
            prop_assert!(restored(&laid_out(&data, Some(of_segment))).unwrap() == data);
        }
    }

    #[test]
    fn random_payloads_are_laid_out(seed: u64, rows in 1usize..70, columns in 1usize..300) {
        let shape = matrix(rows, columns);
        let mut random = Random(seed);
        for mut data in all(&gaussian(shape, 1.5, seed), shape, None) {
            let payload = Layout::read(&data).unwrap().sections().unwrap().payload.clone();
            data[payload].fill_with(|| random.next() as u8);
            restored(&laid_out(&data, None)).unwrap();
        }
    }
}
