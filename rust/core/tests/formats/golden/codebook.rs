//! Golden codebook tensors remain readable, and encoding gives the same bytes.

use moepack_core::formats::codebook::{self, Content, View};
use moepack_core::pool;
use moepack_core::types::Shape;

use super::{bytes, cases, floats, list, number, read};

#[test]
fn golden_files_decode_and_are_written_the_same() {
    let pool = pool::current().unwrap();
    for case in cases("codebook") {
        let name = case["name"].as_str().unwrap();
        let codes = bytes(case["codes"].as_str().unwrap());
        let centroids = list(&case["centroids"], |x| x.as_i64().unwrap() as i16);
        let scales = floats(&case["scales"]);
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
        let data = read(&format!("codebook/{name}.bin"));
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
