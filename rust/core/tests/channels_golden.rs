//! Golden tensors of channels remain readable.

use std::fs;
use std::path::PathBuf;

use moepack_core::formats::channels::View;
use moepack_core::pool;
use serde_json::Value;

#[test]
fn golden_files_are_read() {
    let folder = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/golden/channels"
    ));
    let json: Value = serde_json::from_str(&fs::read_to_string(folder.join("cases.json")).unwrap()).unwrap();
    let cases = json.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let data = fs::read(folder.join(format!("{name}.bin"))).unwrap();
        let view = View::parse(&data).unwrap();
        view.verify(&pool::current().unwrap()).unwrap();
        let (layout, shape) = (view.layout(), view.layout().shape());
        let sizes = [shape.experts, shape.rows, layout.half()].map(|size| Value::from(size as u64));
        assert_eq!(case["shape"].as_array().unwrap()[..], sizes, "{name}");
        assert_eq!(case["bits"], layout.width().bits() as u64, "{name}");
        let mut row = vec![0.0; shape.columns];
        let mut wanted = case["values"].as_array().unwrap().iter();
        for record in 0..shape.experts * shape.rows {
            view.decode_values(record, &mut row);
            assert!(
                row.iter()
                    .all(|&value| wanted.next().unwrap().as_f64() == Some(f64::from(value))),
                "{name}"
            );
        }
        for (expert, threshold) in case["thresholds"].as_array().unwrap().iter().enumerate() {
            let threshold = threshold.as_f64().unwrap_or(f64::INFINITY);
            assert_eq!(f64::from(view.threshold(expert)), threshold, "{name}");
        }
    }
}
