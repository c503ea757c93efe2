//! Encoding and decoding: whatever is encoded parses, verifies and decodes to the same codes and levels.

use moepack_core::pool;
use moepack_core::ternary::{self, Code, Shape, TernaryView};
use proptest::prelude::*;

/// A row of a kind that encoders treat differently.
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
            rank: 3,
        };
        let codes = prop::collection::vec(row(columns), experts * rows).prop_map(|rows| rows.concat());
        let level = prop_oneof![Just(0.0f32), 1e-3..2.0f32, Just(0.5f32)];
        let levels = prop::collection::vec((level.clone(), level).prop_map(|(a, b)| (-a, b)), experts * rows);
        (Just(shape), codes, levels)
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
