use proptest::prelude::*;

use super::huffman::{MAX_BITS, codewords, complete, lengths};
use super::*;
use crate::formats::groupwise::{ParameterType, Spec, tests as plain};
use crate::gemm::groupwise::{Groupwise, MODES};
use crate::gemm::matmul_grouped;
use crate::pool;
use crate::simd::Isa;
use crate::types::Mode;

fn spec(bits: u8, group: usize, symmetric: bool) -> Spec {
    Spec {
        bits,
        group,
        symmetric,
        parameters: ParameterType::F16,
    }
}

fn coded(blob: &[u8]) -> Vec<u8> {
    encode(&View::parse(blob).unwrap(), &pool::current().unwrap()).unwrap()
}

#[test]
fn tensors_come_back_bit_for_bit() {
    let pool = pool::current().unwrap();
    for bits in [2, 3, 4, 8] {
        for (experts, rows, columns) in [
            (1, 1, 1),
            (2, 17, 65),
            (3, 40, 256),
            (1, 16, 700),
            (0, 5, 5),
            (2, 0, 9),
            (2, 9, 0),
        ] {
            for (group, symmetric) in [(64, false), (0, true)] {
                let blob = plain::case(experts, rows, columns, spec(bits, group, symmetric)).blob;
                let data = coded(&blob);
                let tensor = Coded::parse(&data).unwrap();
                assert_eq!(tensor.total_bytes(), data.len());
                let view = tensor.view(&data).unwrap();
                assert!(view.expand(&pool).unwrap() == blob);
                view.verify(&pool).unwrap();
            }
        }
    }
}

#[test]
fn skewed_codes_shrink() {
    let mut case = plain::case(2, 64, 512, spec(2, 64, false));
    case.codes
        .iter_mut()
        .enumerate()
        .for_each(|(i, code)| *code = [1, 2, 1, 2, 1, 2, 0, 3][i * i % 8]);
    let view = View::parse(&case.blob).unwrap().layout();
    let pool = pool::current().unwrap();
    let blob = crate::formats::groupwise::encode(
        &case.codes,
        &case.scales,
        case.offsets.as_deref(),
        view.shape(),
        view.spec(),
        &pool,
    );
    let blob = blob.unwrap();
    assert!(coded(&blob).len() < blob.len() * 9 / 10);
}

#[test]
fn products_are_those_of_the_plain_tensor() {
    let pool = pool::current().unwrap();
    for bits in [2, 4] {
        let blob = plain::case(3, 50, 130, spec(bits, 64, false)).blob;
        let (plain, data) = (View::parse(&blob).unwrap(), coded(&blob));
        let tensor = Coded::parse(&data).unwrap();
        let view = tensor.view(&data).unwrap();
        let x: Vec<f32> = (0..7 * 130).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        for mode in MODES {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let (mut wanted, mut found) = (vec![0.0; 7 * 50], vec![0.0; 7 * 50]);
                let weights = Groupwise::new(plain, mode, isa).unwrap();
                matmul_grouped(&weights, &x[..], &[0, 2, 2, 7], &mut wanted, &pool).unwrap();
                let weights = Groupwise::new(view, mode, isa).unwrap();
                matmul_grouped(&weights, &x[..], &[0, 2, 2, 7], &mut found, &pool).unwrap();
                assert_eq!(wanted, found);
            }
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    let data = coded(&plain::case(2, 20, 70, spec(2, 64, false)).blob);
    for length in 0..data.len() {
        assert!(Coded::parse(&data[..length]).is_err(), "{length}");
    }
    let longer = [&data[..], &[0; 64]].concat();
    assert!(matches!(Coded::parse(&longer), Err(Error::Corruption(_))));
}

#[test]
fn every_flipped_bit_is_found_or_changes_the_tensor() {
    let pool = pool::current().unwrap();
    let blob = plain::case(1, 16, 64, spec(2, 64, false)).blob;
    let data = coded(&blob);
    for bit in 0..8 * data.len() {
        let mut damaged = data.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let Ok(tensor) = Coded::parse(&damaged) else {
            continue;
        };
        let view = tensor.view(&damaged).unwrap();
        if view.verify(&pool).is_ok() {
            assert!(view.expand(&pool).unwrap() != blob, "bit {bit}");
        }
    }
}

#[test]
fn a_shape_that_the_payload_has_not_earned_is_refused() {
    let mut data = coded(&plain::case(1, 16, 64, spec(2, 64, false)).blob);
    data[64 + 32..64 + 40].copy_from_slice(&(1u64 << 20).to_le_bytes());
    assert!(matches!(Coded::parse(&data), Err(Error::Corruption(_))));
    data[64 + 24..64 + 32].copy_from_slice(&(1u64 << 30).to_le_bytes());
    assert!(matches!(Coded::parse(&data), Err(Error::InsufficientData(_))));
}

#[test]
fn a_view_of_other_data_is_refused() {
    let data = coded(&plain::case(1, 16, 64, spec(2, 64, false)).blob);
    let tensor = Coded::parse(&data).unwrap();
    assert!(tensor.view(&data[..data.len() - 1]).is_err());
}

#[test]
fn codes_are_complete_whatever_occurs() {
    let mut fibonacci = [0u64; 256];
    (fibonacci[0], fibonacci[1]) = (1, 1);
    for i in 2..60 {
        fibonacci[i] = fibonacci[i - 1] + fibonacci[i - 2];
    }
    let mut one = [0; 256];
    one[77] = 5;
    for counts in [[0; 256], one, [1; 256], [u64::MAX >> 9; 256], fibonacci] {
        let lengths = lengths(&counts);
        assert!(complete(&lengths));
        assert!((0..256).all(|symbol| counts[symbol] == 0 || lengths[symbol] > 0));
        let words = codewords(&lengths);
        for a in 0..256 {
            for b in (0..256).filter(|&b| b != a && lengths[a] > 0 && lengths[a] <= lengths[b]) {
                assert_ne!(words[a], words[b] & ((1 << lengths[a]) - 1), "{a} begins {b}");
            }
        }
    }
    assert!(!complete(&[0; 256]));
    assert!(!complete(&[MAX_BITS as u8 + 1; 256]));
    assert!(!complete(&[9; 256]));
}

#[test]
fn lengths_are_near_the_entropy() {
    let counts: [u64; 256] = std::array::from_fn(|i| 1_000_000 / (i as u64 + 20).pow(2) + 1);
    let total = counts.iter().sum::<u64>() as f64;
    let lengths = lengths(&counts);
    let (mut mean, mut entropy) = (0.0, 0.0);
    for (count, length) in counts.into_iter().zip(lengths) {
        let share = count as f64 / total;
        mean += share * f64::from(length);
        entropy -= share * share.log2();
    }
    assert!(mean >= entropy && mean < entropy + 0.1, "{mean} {entropy}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_payloads_and_indices_never_panic(
        places in prop::collection::vec((0usize..4096, any::<u8>()), 1..12),
        rows in 1usize..40,
        columns in 1usize..200,
    ) {
        let pool = pool::current().unwrap();
        let mut data = coded(&plain::case(2, rows, columns, spec(2, 32, false)).blob);
        for (place, byte) in places {
            let place = place % data.len();
            data[place] = byte;
        }
        if let Ok(tensor) = Coded::parse(&data) {
            let view = tensor.view(&data).unwrap();
            let _ = view.verify(&pool);
            let shape = tensor.layout().shape();
            if shape.columns <= 4096 && shape.rows * shape.experts <= 4096 && shape.experts > 0 {
                let offsets: Vec<usize> = (0..=shape.experts).map(|e| usize::from(e > 0)).collect();
                let (x, mut y) = (vec![1.0f32; shape.columns], vec![0.0; shape.rows]);
                let weights = Groupwise::new(view, Mode::Exact, Isa::Scalar).unwrap();
                matmul_grouped(&weights, &x[..], &offsets, &mut y, &pool).unwrap();
            }
        }
    }
}
