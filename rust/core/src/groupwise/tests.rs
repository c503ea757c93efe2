use proptest::prelude::*;

use super::*;
use crate::pool;

pub(crate) struct Case {
    pub codes: Vec<u8>,
    pub parameters: Vec<f32>,
    pub blob: Vec<u8>,
}

/// A tensor of pseudo-random codes and f16 parameters.
pub(crate) fn case(experts: usize, rows: usize, columns: usize, group: usize) -> Case {
    let mut state = (experts * 31 + rows * 7 + columns) as u32 + 1;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let shape = Shape {
        experts,
        rows,
        columns,
        rank: 3,
    };
    let groups = columns.div_ceil(group.min(columns.max(1).next_multiple_of(CHUNK)));
    let codes = (0..experts * rows * columns)
        .map(|_| (next() % 4) as u8)
        .collect::<Vec<_>>();
    let value = |n: u32, sign: f32| half::f16::from_f32((n % 1000) as f32 / 1000.0 - sign).to_f32();
    let parameters = (0..2 * experts * rows * groups)
        .map(|i| value(next(), if i % 2 == 0 { 0.0 } else { 0.5 }))
        .collect::<Vec<_>>();
    let blob = encode(&codes, &parameters, shape, group, &pool::current().unwrap()).unwrap();
    Case {
        codes,
        parameters,
        blob,
    }
}

proptest! {
    #[test]
    fn what_goes_in_comes_out(experts in 0usize..3, rows in 0usize..5, columns in 0usize..200, groups in 1usize..4) {
        let Case { codes, parameters, blob, .. } = case(experts, rows, columns, 64 * groups);
        let view = View::parse(&blob).unwrap();
        view.verify().unwrap();
        let mut found = vec![0; columns];
        for row in 0..experts * rows {
            view.decode_row(row, &mut found);
            prop_assert_eq!(&found[..], &codes[row * columns..][..columns]);
            let mut values = vec![0.0; columns];
            view.decode_values(row, &mut values);
            for c in 0..columns {
                let at = 2 * (row * view.layout().groups() + c / view.layout().group_size());
                let expected = parameters[at] * f32::from(found[c]) + parameters[at + 1];
                prop_assert_eq!(values[c], expected);
            }
        }
    }

    #[test]
    fn any_flipped_bit_is_harmless(at in 0usize..4096, bit in 0u8..8) {
        let mut blob = case(2, 3, 130, 64).blob;
        let at = at % blob.len();
        blob[at] ^= 1 << bit;
        if let Ok(view) = View::parse(&blob) {
            let _ = view.verify();
            view.decode_row(5, &mut [0; 130]);
        }
    }
}

#[test]
fn sizes_are_exact() {
    let blob = case(2, 3, 130, 64).blob;
    // header, 6 rows of 3 groups of 4 bytes, 6 rows of 3 chunks of 16 bytes
    assert_eq!(blob.len(), 128 + 128 + 320);
    for length in 0..blob.len() {
        assert!(View::parse(&blob[..length]).is_err());
    }
    let longer: Vec<u8> = blob.iter().copied().chain([0; 64]).collect();
    assert!(matches!(View::parse(&longer), Err(Error::Corruption(_))));
}

#[test]
fn huge_claims_are_refused_before_anything_is_computed() {
    let mut blob = case(1, 1, 64, 64).blob;
    for at in [16, 24, 32, 40] {
        let mut damaged = blob.clone();
        damaged[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(View::parse(&damaged).is_err());
        damaged[at..at + 8].copy_from_slice(&((1u64 << 31) - 64).to_le_bytes());
        assert!(at == 40 || View::parse(&damaged).is_err());
    }
    blob[127] = 1;
    assert!(View::parse(&blob).is_err());
}

#[test]
fn verify_names_the_row() {
    let good = case(2, 3, 130, 64).blob;
    let mut infinite = good.clone();
    infinite[128 + 4 * 3 * 4..][..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    let error = View::parse(&infinite).unwrap().verify().unwrap_err().to_string();
    assert!(error.contains("expert 1 row 1"), "{error}");
    let mut padded = good;
    let last = padded.len() - 64 + 32 - 1;
    padded[last] = 0x80;
    assert!(View::parse(&padded).unwrap().verify().is_err());
}

#[test]
fn bad_arguments_are_refused() {
    let pool = pool::current().unwrap();
    let shape = Shape {
        experts: 1,
        rows: 1,
        columns: 64,
        rank: 2,
    };
    let codes = vec![0; 64];
    for (codes, parameters, group) in [
        (vec![4; 64], vec![1.0, 0.0], 64),
        (codes.clone(), vec![-1.0, 0.0], 64),
        (codes.clone(), vec![1.0, 1e9], 64),
        (codes.clone(), vec![f32::NAN, 0.0], 64),
        (codes.clone(), vec![1.0], 64),
        (codes.clone(), vec![1.0, 0.0], 32),
        (codes, vec![1.0, 0.0], 0),
    ] {
        assert!(encode(&codes, &parameters, shape, group, &pool).is_err());
    }
}
