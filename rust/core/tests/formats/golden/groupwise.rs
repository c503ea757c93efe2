//! Golden group-wise tensors remain readable, and encoding gives the same bytes.

use moepack_core::formats::groupwise::{self, ParameterType, Spec, View};
use moepack_core::pool;
use moepack_core::types::Shape;

use super::{bytes, cases, floats, number, read};

#[test]
fn golden_files_decode_and_are_written_the_same() {
    let pool = pool::current().unwrap();
    for case in cases("groupwise") {
        let scales = floats(&case["scales"]);
        let offsets = case["offsets"].is_array().then(|| floats(&case["offsets"]));
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
        let data = read(&format!("groupwise/{name}.bin"));
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
