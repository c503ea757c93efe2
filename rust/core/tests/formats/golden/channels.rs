//! Golden tensors of channels remain readable.

use moepack_core::formats::channels::View;
use moepack_core::pool;
use serde_json::Value;

use super::{cases, read};

#[test]
fn golden_files_are_read() {
    for case in cases("channels") {
        let name = case["name"].as_str().unwrap();
        let data = read(&format!("channels/{name}.bin"));
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
