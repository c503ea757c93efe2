//! Golden compensated tensors remain readable, and encoding gives the same bytes.

use moepack_core::formats::compensated::chunk::Width;
use moepack_core::formats::compensated::{self, Factor, View};
use moepack_core::pool;
use serde_json::Value;

use super::{bytes, cases, floats, list, number, read};

/// Codes and scales, or values.
struct Rows(Option<Vec<u8>>, Vec<f32>);

impl Rows {
    fn of(value: &Value) -> Rows {
        match value["codes"].as_str() {
            Some(hex) => Rows(Some(bytes(hex)), floats(&value["scales"])),
            None => Rows(None, floats(&value["values"])),
        }
    }

    fn factor(&self) -> Factor<'_> {
        match &self.0 {
            Some(codes) => Factor::Codes {
                codes,
                scales: &self.1,
            },
            None => Factor::Values(&self.1),
        }
    }
}

#[test]
fn golden_files_decode_and_are_written_the_same() {
    let pool = pool::current().unwrap();
    for case in cases("compensated") {
        let name = case["name"].as_str().unwrap();
        let data = read(&format!("compensated/{name}.bin"));
        let view = View::parse(&data).unwrap();
        view.verify(&pool).unwrap();
        let shape = view.layout().shape();
        let expected = list(&case["shape"], number);
        assert_eq!([shape.experts, shape.rows, shape.columns], *expected, "{name}");
        let ranks = list(&case["ranks"], number);
        assert_eq!(
            (0..shape.experts).map(|e| view.rank(e)).collect::<Vec<_>>(),
            ranks
        );
        let products = floats(&case["products"]);
        let mut row = vec![0.0; shape.columns];
        for (at, expected) in products.into_iter().enumerate() {
            view.decode_values(at / shape.rows, at % shape.rows, &mut row);
            let terms = row
                .iter()
                .enumerate()
                .map(|(c, &value)| f64::from(value) * (c as f64 % 7.0 - 3.0));
            let found: f64 = terms.sum();
            assert!(
                (found - f64::from(expected)).abs() <= 1e-3,
                "{name}: {found} instead of {expected}"
            );
        }
        let width = Width::from_bits(number(&case["rank_bits"]) as u8).unwrap();
        let base = &data[compensated::HEADER_BYTES..][..view.layout().base().total_bytes()];
        let (right, left) = (Rows::of(&case["right"]), Rows::of(&case["left"]));
        let again = compensated::encode(base, &ranks, right.factor(), left.factor(), width).unwrap();
        assert!(again == data, "{name}");
    }
}
