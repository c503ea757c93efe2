//! Damaged tensors: every truncation and every flipped bit gives an error or other weights, and never a panic.

use moepack_core::formats::ternary::{self, Code, TernaryView};
use moepack_core::pool;
use moepack_core::types::Shape;
use moepack_core::{Error, Result};
use proptest::prelude::*;
use rayon::ThreadPool;

/// A small tensor with sparse, dense, one-sided and zero rows, more than a group of them.
fn tensor(code: Code, pool: &ThreadPool) -> Vec<u8> {
    let shape = Shape {
        experts: 2,
        rows: 67,
        columns: 90,
        ndim: 3,
    };
    let mut codes = vec![0; 2 * 67 * 90];
    for (i, place) in codes.iter_mut().enumerate() {
        let draw = (i as u32).wrapping_mul(2_654_435_761) >> 16;
        let one_in = [7, 9, 2, 30, 1 << 16][i / 90 % 5];
        *place = if draw.is_multiple_of(one_in) {
            [1, -1][draw as usize / 64 % 2]
        } else {
            0
        };
    }
    let levels = vec![(-0.5, 0.75); 2 * 67];
    ternary::encode(&codes, &levels, shape, code, pool).unwrap()
}

/// Runs everything that reads untrusted bytes; fails if any of it fails.
fn read_all(bytes: &[u8], pool: &ThreadPool) -> Result<()> {
    let view = TernaryView::parse(bytes)?;
    let Some(weights) = view.shape().weights().filter(|&weights| weights < 1 << 20) else {
        return view.verify(pool);
    };
    let verified = view.verify(pool);
    let decoded = ternary::decode_codes(&view, &mut vec![0; weights], pool);
    let valued = ternary::decode_values_f32(&view, &mut vec![0.0; weights], pool);
    assert_eq!(decoded.is_ok(), valued.is_ok());
    if verified.is_ok() {
        decoded.clone().unwrap();
    }
    for row in 0..view.rows().min(70) {
        if view.experts() > 0 {
            let _ = ternary::decode_row(&view, 0, row, &mut vec![0; view.columns()]);
        }
    }
    verified.and(decoded)
}

#[test]
fn every_truncation_is_an_error() {
    let pool = pool::current().unwrap();
    for code in Code::ALL {
        let whole = tensor(code, &pool);
        read_all(&whole, &pool).unwrap();
        for length in 0..whole.len() {
            let error = read_all(&whole[..length], &pool).unwrap_err();
            assert!(
                matches!(error, Error::InsufficientData(_)),
                "{length} bytes: {error}"
            );
        }
    }
}

#[test]
fn a_longer_tensor_is_an_error() {
    let pool = pool::current().unwrap();
    let mut longer = tensor(Code::Fsv8, &pool);
    longer.extend([0; 64]);
    assert!(matches!(read_all(&longer, &pool), Err(Error::Corruption(_))));
}

#[test]
fn flipped_bits_do_no_harm() {
    let pool = pool::current().unwrap();
    for code in Code::ALL {
        let mut bytes = tensor(code, &pool);
        let (mut found, total) = (0, 8 * bytes.len());
        for bit in 0..total {
            bytes[bit / 8] ^= 1 << (bit % 8);
            found += usize::from(read_all(&bytes, &pool).is_err());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        // Undetected damage gives other valid codes and levels, which only checksums detect.
        assert!(found > total / 3, "{}: {found} of {total}", code.name());
    }
}

#[test]
fn flipped_bits_of_metadata_are_found() {
    let pool = pool::current().unwrap();
    for code in Code::ALL {
        let mut bytes = tensor(code, &pool);
        // Levels of another type of the same size, and other dictionaries with the same codes, remain undetected.
        for byte in (0..11).chain(12..14).chain(22..128) {
            for bit in 0..8 {
                bytes[byte] ^= 1 << bit;
                assert!(
                    read_all(&bytes, &pool).is_err(),
                    "{}: bit {bit} of byte {byte}",
                    code.name()
                );
                bytes[byte] ^= 1 << bit;
            }
        }
    }
}

#[test]
fn errors_name_the_row() {
    let pool = pool::current().unwrap();
    let bytes = tensor(Code::Fsv8, &pool);
    let view = TernaryView::parse(&bytes).unwrap();
    let place = view.group_rows(1, 1).next().unwrap();
    assert_eq!(place.row, 64);
    let at = bytes.len() - view.padded_payload().len() + place.start;
    let mut damaged = bytes.clone();
    // Changing another code to 127 or 255 changes the row's length or gives a code that does not exist in the state.
    damaged[at] ^= 0xff;
    let error = read_all(&damaged, &pool).unwrap_err().to_string();
    assert!(error.contains("expert 1, row 64"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..700)) {
        let _ = read_all(&bytes, &pool::current().unwrap());
    }

    #[test]
    fn arbitrary_damage_does_no_harm(
        code in prop::sample::select(&Code::ALL[..]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let pool = pool::current().unwrap();
        let mut bytes = tensor(code, &pool);
        for (place, byte) in changes {
            let at = place.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_all(&bytes, &pool);
    }
}

#[test]
fn metadata_serve_only_bytes_of_the_same_length() {
    let pool = pool::current().unwrap();
    let bytes = tensor(Code::Fsv8, &pool);
    let metadata = TernaryView::parse(&bytes).unwrap().metadata();
    TernaryView::again(&bytes, &metadata)
        .unwrap()
        .verify(&pool)
        .unwrap();
    let error = TernaryView::again(&bytes[1..], &metadata).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)));
}
