//! Golden codebook tensors remain readable, and encoding gives the same bytes.

use std::fs;
use std::path::PathBuf;

use moepack_core::formats::codebook::{self, Content, View};
use moepack_core::pool;
use moepack_core::types::Shape;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/golden/codebook"
    ))
    .join(name)
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn list<T>(value: &Value, read: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap().iter().map(read).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

#[test]
fn golden_files_decode_and_are_written_the_same() {
    let pool = pool::current().unwrap();
    let json: Value = serde_json::from_str(&fs::read_to_string(golden("cases.json")).unwrap()).unwrap();
    let cases = json.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let codes = bytes(case["codes"].as_str().unwrap());
        let centroids = list(&case["centroids"], |x| x.as_i64().unwrap() as i16);
        let scales = list(&case["scales"], |x| x.as_f64().unwrap() as f32);
        let shape = Shape {
            experts: number(&case["shape"][0]),
            rows: number(&case["shape"][1]),
            columns: number(&case["shape"][2]),
            ndim: number(&case["rank"]) as u8,
        };
        let content = Content {
            shape,
            bits: number(&case["bits"]) as u8,
            block: number(&case["block"]),
            activation_bits: number(&case["activation_bits"]) as u8,
            hadamard: case["hadamard"].as_u64().map_or(1, |width| width as usize),
            codes: &codes,
            centroids: &centroids,
            scales: &scales,
        };
        let data = fs::read(golden(&format!("{name}.bin"))).unwrap();
        let view = View::parse(&data).unwrap();
        view.verify().unwrap();
        assert_eq!(view.layout().shape(), shape, "{name}");
        let mut row = vec![0; shape.columns];
        for at in 0..shape.experts * shape.rows {
            view.decode_row(at / shape.rows, at % shape.rows, &mut row);
            assert_eq!(row, codes[at * shape.columns..][..shape.columns], "{name}");
        }
        assert!(codebook::encode(content, &pool).unwrap() == data, "{name}");
    }
}
