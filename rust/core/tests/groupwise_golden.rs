//! Golden group-wise tensors remain readable, and encoding gives the same bytes.

use std::fs;
use std::path::PathBuf;

use moepack_core::formats::groupwise::{self, ParameterType, Spec, View};
use moepack_core::pool;
use moepack_core::types::Shape;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/golden/groupwise"
    ))
    .join(name)
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn floats(value: &Value) -> Option<Vec<f32>> {
    let list = value.as_array()?;
    Some(list.iter().map(|x| x.as_f64().unwrap() as f32).collect())
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
        let (scales, offsets) = (floats(&case["scales"]).unwrap(), floats(&case["offsets"]));
        let shape = Shape {
            experts: number(&case["shape"][0]),
            rows: number(&case["shape"][1]),
            columns: number(&case["shape"][2]),
            ndim: number(&case["rank"]) as u8,
        };
        let spec = Spec {
            bits: number(&case["bits"]) as u8,
            group: number(&case["group"]),
            symmetric: offsets.is_none(),
            parameters: ParameterType::from_name(case["dtype"].as_str().unwrap()).unwrap(),
        };
        let codes = bytes(case["codes"].as_str().unwrap());
        let name = case["name"].as_str().unwrap();
        let data = fs::read(golden(&format!("{name}.bin"))).unwrap();
        let view = View::parse(&data).unwrap();
        view.verify(&pool).unwrap();
        assert_eq!(
            (view.layout().shape(), view.layout().spec()),
            (shape, spec),
            "{name}"
        );
        let mut row = vec![0; shape.columns];
        for at in 0..shape.experts * shape.rows {
            view.decode_row(at, &mut row);
            assert_eq!(row, codes[at * shape.columns..][..shape.columns], "{name}");
        }
        let again = groupwise::encode(&codes, &scales, offsets.as_deref(), shape, spec, &pool).unwrap();
        assert!(again == data, "{name}");
    }
}
