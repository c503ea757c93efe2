//! Round trips and refused bytes.

use super::chunk::{CHUNK, Width};
use super::*;
use crate::formats::groupwise::{self, ParameterType, Spec};
use crate::pool;
use crate::types::Shape;

/// A packed tensor with its sources; all values follow from the sizes.
pub(crate) struct Case {
    pub blob: Vec<u8>,
    pub ranks: Vec<usize>,
    /// Rows of V and of U^T as values.
    pub right: Vec<f32>,
    pub left: Vec<f32>,
}

fn noise(seed: usize) -> impl FnMut() -> u32 {
    let mut state = (seed as u32).wrapping_mul(2_654_435_761).wrapping_add(12345);
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    }
}

struct Side {
    codes: Vec<u8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

fn side(rows: usize, length: usize, width: Width) -> Side {
    let mut next = noise(rows + 7 * length);
    let chunks = length.div_ceil(CHUNK);
    let codes: Vec<u8> = (0..rows * length)
        .map(|_| (next() % (1 << width.bits().min(8))) as u8)
        .collect();
    let scales: Vec<f32> = (0..rows * chunks)
        .map(|_| (next() % 64) as f32 / 256.0 - 0.125)
        .collect();
    let value = |(at, &code): (usize, &u8)| match width {
        Width::Half => f32::from(code) / 64.0 - 2.0,
        _ => {
            let scale = scales[at / length * chunks + at % length / CHUNK];
            scale * (f32::from(code) - f32::from(width.middle()))
        }
    };
    let values = codes.iter().enumerate().map(value).collect();
    Side {
        codes,
        scales,
        values,
    }
}

impl Side {
    fn factor(&self, width: Width) -> Factor<'_> {
        match width {
            Width::Half => Factor::Values(&self.values),
            _ => Factor::Codes {
                codes: &self.codes,
                scales: &self.scales,
            },
        }
    }
}

pub(crate) fn base(experts: usize, rows: usize, columns: usize) -> Vec<u8> {
    let mut next = noise(experts + rows + columns);
    let shape = Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    };
    let spec = Spec {
        bits: 3,
        group: 64,
        symmetric: false,
        parameters: ParameterType::F16,
    };
    let codes: Vec<u8> = (0..experts * rows * columns)
        .map(|_| (next() % 8) as u8)
        .collect();
    let groups = experts * rows * columns.div_ceil(64);
    let mut parameters =
        || -> Vec<f32> { (0..groups).map(|_| (next() % 100) as f32 / 64.0 - 0.75).collect() };
    let (scales, offsets) = (parameters(), parameters());
    let pool = pool::current().unwrap();
    groupwise::encode(&codes, &scales, Some(&offsets), shape, spec, &pool).unwrap()
}

pub(crate) fn case(ranks: &[usize], rows: usize, columns: usize, width: Width) -> Case {
    let total = ranks.iter().sum();
    let (right, left) = (side(total, columns, width), side(total, rows, width));
    let base = base(ranks.len(), rows, columns);
    let blob = encode(&base, ranks, right.factor(width), left.factor(width), width).unwrap();
    Case {
        blob,
        ranks: ranks.to_vec(),
        right: right.values,
        left: left.values,
    }
}

#[test]
fn chunks_keep_every_code() {
    let mut next = noise(1);
    for width in [Width::Three, Width::Eight] {
        for _ in 0..50 {
            let codes: [u8; CHUNK] = std::array::from_fn(|_| (next() % (1 << width.bits())) as u8);
            let mut bytes = vec![0; width.chunk_bytes()];
            width.pack(&codes, &mut bytes);
            let expected = codes.map(|code| f32::from(code) - f32::from(width.middle()));
            assert_eq!(width.unpack(&bytes), expected);
        }
    }
}

#[test]
fn halves_are_read_exactly() {
    for bits in 0..=u16::MAX {
        let expected = half::f16::from_bits(bits);
        let mut bytes = vec![0; Width::Half.chunk_bytes()];
        bytes[..2].copy_from_slice(&bits.to_le_bytes());
        let found = Width::Half.unpack(&bytes)[0];
        match expected.is_finite() {
            true => assert_eq!(found.to_bits(), expected.to_f32().to_bits()),
            false => assert!(found.is_finite()),
        }
    }
}

#[test]
fn round_trips() {
    let pool = pool::current().unwrap();
    for width in Width::ALL {
        for (ranks, rows, columns) in [
            (vec![3, 0, 8], 20, 70),
            (vec![16], 64, 128),
            (vec![0, 0], 5, 6),
            (vec![], 4, 4),
            (vec![0], 0, 9),
            (vec![0], 9, 0),
            (vec![1, 1], 1, 65),
        ] {
            let case = case(&ranks, rows, columns, width);
            let view = View::parse(&case.blob).unwrap();
            view.verify(&pool).unwrap();
            let mut first = 0;
            for (expert, &rank) in ranks.iter().enumerate() {
                assert_eq!(view.rank(expert), rank);
                for row in 0..rows {
                    let mut expected = vec![0.0; columns];
                    view.base().decode_values(expert * rows + row, &mut expected);
                    for k in first..first + rank {
                        for (c, value) in expected.iter_mut().enumerate() {
                            *value += case.left[k * rows + row] * case.right[k * columns + c];
                        }
                    }
                    let mut found = vec![f32::NAN; columns];
                    view.decode_values(expert, row, &mut found);
                    for (found, expected) in found.iter().zip(expected) {
                        assert!((found - expected).abs() <= 1e-4 * (1.0 + expected.abs()));
                    }
                }
                first += rank;
            }
        }
    }
}

#[test]
fn a_rank_costs_its_rows_and_nothing_else() {
    let sizes: Vec<usize> = [0, 1, 2, 33]
        .map(|rank| case(&[rank, 0, 1], 64, 128, Width::Three).blob.len())
        .into();
    for (rank, size) in [1, 2, 33].into_iter().zip(&sizes[1..]) {
        let exact = rank * (2 + 1) * (24 + 2);
        assert!(size - sizes[0] <= exact + 4 * 64 && size - sizes[0] + 4 * 64 >= exact);
    }
}

#[test]
fn every_truncation_is_refused() {
    let blob = case(&[2, 5], 20, 70, Width::Three).blob;
    for end in 0..blob.len() {
        assert!(View::parse(&blob[..end]).is_err(), "{end}");
    }
    let mut longer = blob.clone();
    longer.extend([0; 64]);
    assert!(View::parse(&longer).is_err());
}

#[test]
fn damage_is_refused_or_harmless() {
    let pool = pool::current().unwrap();
    for width in Width::ALL {
        let blob = case(&[2, 5], 20, 70, width).blob;
        let mut row = vec![0.0; 70];
        let mut refused = 0;
        for at in 0..blob.len() {
            for bit in [1, 0x80] {
                let mut damaged = blob.clone();
                damaged[at] ^= bit;
                match View::parse(&damaged) {
                    Ok(view) if view.layout().shape().columns == 70 => {
                        let _ = view.verify(&pool);
                        (0..view.layout().shape().rows.min(20))
                            .for_each(|r| view.decode_values(0, r, &mut row));
                    }
                    Ok(_) => {}
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > 200);
    }
}

#[test]
fn padding_and_scales_are_verified() {
    let pool = pool::current().unwrap();
    let blob = case(&[2, 5], 20, 70, Width::Three).blob;
    let layout = View::parse(&blob).unwrap().layout();
    let spoil = |at: usize, value: &[u8]| {
        let mut bad = blob.clone();
        bad[at..at + value.len()].copy_from_slice(value);
        View::parse(&bad).unwrap().verify(&pool)
    };
    let right = layout.right();
    assert!(spoil(blob.len() - 1, &[1]).is_err());
    assert!(spoil(right.codes_at - 1, &[1]).is_err());
    assert!(spoil(right.scales_at, &0x7c00u16.to_le_bytes()).is_err());
    assert!(
        spoil(right.codes_at + 24 + 23, &[0]).is_err(),
        "codes after column 70"
    );
    let half = case(&[2, 5], 20, 70, Width::Half).blob;
    let at = View::parse(&half).unwrap().layout().left().codes_at;
    let mut bad = half.clone();
    bad[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    assert!(View::parse(&bad).unwrap().verify(&pool).is_err());
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let case = case(&[2, 5], 20, 70, Width::Three);
    let at = View::parse(&case.blob).unwrap().layout().ranks_at();
    for (first, second) in [(3u32, 5u32), (5, 1), (u32::MAX, 8), (7, 0), (0, 7)] {
        let mut bad = case.blob.clone();
        bad[at..at + 4].copy_from_slice(&first.to_le_bytes());
        bad[at + 4..at + 8].copy_from_slice(&second.to_le_bytes());
        assert_eq!(View::parse(&bad).is_ok(), first as usize + second as usize == 7);
    }
    assert_eq!(case.ranks, [2, 5]);
}

#[test]
fn writers_refuse_content_that_cannot_be_read() {
    let base = base(1, 4, 6);
    let codes = |codes, scales| Factor::Codes { codes, scales };
    let good = (codes(&[4; 6], &[0.5]), codes(&[4; 4], &[0.5]));
    assert!(encode(&base, &[1], good.0, good.1, Width::Three).is_ok());
    assert!(encode(&base, &[1, 1], good.0, good.1, Width::Three).is_err());
    assert!(encode(&base, &[5], good.0, good.1, Width::Three).is_err());
    assert!(encode(&base, &[2], good.0, good.1, Width::Three).is_err());
    assert!(encode(&base, &[1], codes(&[8; 6], &[0.5]), good.1, Width::Three).is_err());
    assert!(encode(&base, &[1], codes(&[4; 6], &[0.1]), good.1, Width::Three).is_err());
    assert!(
        encode(
            &base,
            &[1],
            codes(&[4; 6], &[f32::INFINITY]),
            good.1,
            Width::Three
        )
        .is_err()
    );
    assert!(encode(&base, &[1], good.0, good.1, Width::Half).is_err());
    let values = [0.5; 6];
    assert!(encode(&base, &[1], Factor::Values(&values), good.1, Width::Three).is_err());
    assert!(encode(&base[..64], &[1], good.0, good.1, Width::Three).is_err());
}
