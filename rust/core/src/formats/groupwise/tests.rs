use proptest::prelude::*;

use super::*;
use crate::pool;
use crate::types::Shape;

pub(crate) struct Case {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub offsets: Option<Vec<f32>>,
    pub blob: Vec<u8>,
}

/// A tensor of pseudo-random codes; scales and offsets lie in -0.5 to 0.5.
pub(crate) fn case(experts: usize, rows: usize, columns: usize, spec: Spec) -> Case {
    let mut state = (experts * 31 + rows * 7 + columns) as u32 + 1;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let shape = Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    };
    let groups = Layout::new(shape, spec).unwrap().groups();
    let codes = (0..experts * rows * columns)
        .map(|_| (next() % (1 << spec.bits)) as u8)
        .collect::<Vec<_>>();
    let mut values = || {
        let value = |n: u32| half::bf16::from_f32((n % 256) as f32 / 256.0 - 0.5).to_f32();
        (0..experts * rows * groups)
            .map(|_| value(next()))
            .collect::<Vec<f32>>()
    };
    let scales = values();
    let offsets = (!spec.symmetric).then(values);
    let pool = pool::current().unwrap();
    let blob = encode(&codes, &scales, offsets.as_deref(), shape, spec, &pool).unwrap();
    Case {
        codes,
        scales,
        offsets,
        blob,
    }
}

/// All specifications.
pub(crate) fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for bits in crate::bits::WIDTHS {
        for group in GROUP_SIZES.into_iter().chain([0]) {
            for symmetric in [false, true] {
                for parameters in ParameterType::ALL {
                    specs.push(Spec {
                        bits,
                        group,
                        symmetric,
                        parameters,
                    });
                }
            }
        }
    }
    specs
}

pub(crate) fn spec(bits: u8, group: usize, symmetric: bool) -> Spec {
    Spec {
        bits,
        group,
        symmetric,
        parameters: ParameterType::F16,
    }
}

#[test]
fn every_spec_survives_a_round_trip() {
    let pool = pool::current().unwrap();
    for spec in specs() {
        for (experts, rows, columns) in [
            (2, 17, 130),
            (1, 1, 1),
            (1, 16, 256),
            (0, 3, 4),
            (2, 0, 4),
            (2, 3, 0),
            (1, 5, 16),
        ] {
            let case = case(experts, rows, columns, spec);
            let view = View::parse(&case.blob).unwrap();
            view.verify(&pool).unwrap();
            let layout = view.layout();
            assert_eq!((layout.spec(), layout.shape().columns), (spec, columns));
            let mut codes = vec![0; columns];
            let mut values = vec![0.0; columns];
            for row in 0..experts * rows {
                view.decode_row(row, &mut codes);
                assert_eq!(codes, case.codes[row * columns..][..columns]);
                view.decode_values(row, &mut values);
                for (c, &value) in values.iter().enumerate() {
                    let at = row * layout.groups() + c / layout.group_size();
                    let (code, scale) = (f32::from(codes[c]), case.scales[at]);
                    let expected = match &case.offsets {
                        Some(offsets) => scale * code + offsets[at],
                        None => scale * (code - (1 << (spec.bits - 1)) as f32),
                    };
                    assert_eq!(value, expected);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn any_flipped_bit_is_harmless(at in 0usize..8192, bit in 0u8..8, which in 0usize..96) {
        let pool = pool::current().unwrap();
        let mut blob = case(2, 3, 130, specs()[which]).blob;
        let at = at % blob.len();
        blob[at] ^= 1 << bit;
        if let Ok(view) = View::parse(&blob) {
            let verified = view.verify(&pool);
            let shape = view.layout().shape();
            if shape.experts * shape.rows > 0 {
                view.decode_row(shape.experts * shape.rows - 1, &mut vec![0; shape.columns]);
                view.decode_values(0, &mut vec![0.0; shape.columns]);
            }
            // Verification finds flips of padding; flips of codes and of most parameters give other valid tensors.
            prop_assert!(verified.is_err() || at < HEADER_BYTES || blob[at] != 1 << bit || shape.rows > 0);
        }
    }
}

#[test]
fn sizes_are_exact() {
    for (spec, block) in [
        (spec(2, 64, false), 3 * 64 + 5 * 128),
        (spec(3, 64, true), 128 + 5 * 192),
        (spec(4, 0, true), 64 + 5 * 256),
        // Nine groups in five records of two.
        (spec(8, 16, false), 10 * 64 + 5 * 512),
    ] {
        let blob = case(2, 17, 130, spec).blob;
        assert_eq!(blob.len(), 128 + 4 * block, "{spec:?}");
        for length in [0, 127, 128, blob.len() - 64, blob.len() - 1] {
            assert!(matches!(
                View::parse(&blob[..length]),
                Err(Error::InsufficientData(_))
            ));
        }
        let longer: Vec<u8> = blob.iter().copied().chain([0; 64]).collect();
        assert!(matches!(View::parse(&longer), Err(Error::Corruption(_))));
    }
}

#[test]
fn huge_claims_are_refused_before_anything_is_computed() {
    let blob = case(1, 1, 64, spec(2, 64, false)).blob;
    for at in [16, 24, 32, 40] {
        for claim in [u64::MAX, (1 << 31) - 64, 1 << 31, 48] {
            let mut damaged = blob.clone();
            damaged[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            // A tensor without padding rows: 48 rows or columns need another size, and groups of 48 columns are not
            // supported.
            assert!(View::parse(&damaged).is_err() || (at == 32 && claim == 48));
        }
    }
    for (at, byte) in [
        (10, 5),
        (10, 0),
        (11, 2),
        (12, 1),
        (13, 2),
        (14, 1),
        (48, 1),
        (127, 1),
        (8, 2),
        (0, 0),
    ] {
        let mut damaged = blob.clone();
        damaged[at] = byte;
        assert!(View::parse(&damaged).is_err(), "byte {at}");
    }
}

#[test]
fn verify_finds_infinite_parameters_and_non_zero_padding() {
    let pool = pool::current().unwrap();
    let good = case(2, 17, 130, spec(3, 64, false)).blob;
    let block = 3 * 64 + 5 * 192;
    let fault = |at: usize, byte: u8| {
        let mut damaged = good.clone();
        damaged[at] = byte;
        View::parse(&damaged)
            .unwrap()
            .verify(&pool)
            .unwrap_err()
            .to_string()
    };
    // The high byte of the first offset of row 2 of expert 1: infinity.
    let message = fault(128 + 2 * block + 32 + 2 * 2 + 1, 0x7c | 3);
    assert!(message.contains("expert 1 row 2"), "{message}");
    // Row 17 does not exist: damage its parameter and its code in the second record.
    let record = 64 + 2 * 192;
    assert!(fault(128 + block + record + 2, 1).contains("expert 0 row 17"));
    assert!(fault(128 + block + record + 64 + 4, 1).contains("expert 0 row 17"));
    // Column 130 is byte 2 of quad 0 in the last unit, which is the only one of its record.
    assert!(fault(128 + 2 * record + 64 + 2, 1).contains("expert 0 row 0"));
    // The second record of symmetric scales has one group.
    let mut padded = case(1, 16, 130, spec(3, 64, true)).blob;
    padded[128 + 64 + 4 * 192 + 32] = 1;
    assert!(View::parse(&padded).unwrap().verify(&pool).is_err());
}

#[test]
fn bad_arguments_are_refused() {
    let pool = pool::current().unwrap();
    let shape = Shape {
        experts: 1,
        rows: 1,
        columns: 128,
        ndim: 2,
    };
    let good = spec(2, 64, false);
    let codes = vec![0; 128];
    let attempt = |codes: &[u8], scales: &[f32], offsets: Option<&[f32]>, shape, spec| {
        encode(codes, scales, offsets, shape, spec, &pool)
    };
    assert!(attempt(&codes, &[-1.0, 2.0], Some(&[0.0, 0.5]), shape, good).is_ok());
    for (scales, offsets) in [
        (vec![1.0, 1e9], Some(vec![0.0; 2])),
        (vec![1.0, 1.0 + 1e-6], Some(vec![0.0; 2])),
        (vec![f32::NAN, 1.0], Some(vec![0.0; 2])),
        (vec![1.0, 1.0], Some(vec![0.0, f32::INFINITY])),
        (vec![1.0], Some(vec![0.0; 2])),
        (vec![1.0, 1.0], Some(vec![0.0; 3])),
        (vec![1.0, 1.0], None),
    ] {
        assert!(
            attempt(&codes, &scales, offsets.as_deref(), shape, good).is_err(),
            "{scales:?} {offsets:?}"
        );
    }
    let (scales, offsets) = ([1.0; 2], [0.0; 2]);
    assert!(attempt(&[4; 128], &scales, Some(&offsets), shape, good).is_err());
    assert!(attempt(&codes[1..], &scales, Some(&offsets), shape, good).is_err());
    for (bits, group) in [(5, 64), (0, 64), (2, 48), (2, 8), (2, 100)] {
        let spec = Spec { bits, group, ..good };
        assert!(attempt(&codes, &scales, Some(&offsets), shape, spec).is_err());
    }
    for (ndim, experts) in [(1, 1), (2, 2), (4, 1)] {
        let shape = Shape {
            ndim,
            experts,
            ..shape
        };
        assert!(attempt(&codes, &scales, Some(&offsets), shape, good).is_err());
    }
    let whole = Spec { group: 200, ..good };
    let blob = attempt(&codes, &[1.0], Some(&[0.0]), shape, whole).unwrap();
    let layout = View::parse(&blob).unwrap().layout();
    assert_eq!(
        (layout.spec().group, layout.group_size(), layout.groups()),
        (0, 128, 1)
    );
}
