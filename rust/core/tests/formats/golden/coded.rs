//! Golden coded tensors remain readable.

use moepack_core::formats::coded::{self, Coded};
use moepack_core::pool;
use moepack_core::simd::Isa;
use serde_json::Value;

use super::{cases, floats, list, read};

fn codes(data: &[u8], isa: Isa) -> Vec<i32> {
    let (coded, pool) = (Coded::parse(data).unwrap(), pool::current().unwrap());
    let view = coded.view(data).unwrap();
    view.verify(isa, &pool).unwrap();
    let mut codes = vec![0; coded.layout().shape().weights().unwrap()];
    let put = |_, row: &[i32], out: &mut [i32]| {
        out.copy_from_slice(row);
        Ok(())
    };
    view.decode_rows(isa, &mut codes, &pool, put).unwrap();
    codes
}

#[test]
fn golden_files_decode_on_every_set() {
    for case in cases("coded") {
        let name = case["name"].as_str().unwrap();
        let data = read(&format!("coded/{name}.bin"));
        let wanted = list(&case["codes"], |code| code.as_i64().unwrap() as i32);
        let scales = floats(&case["scales"]);
        let coded = Coded::parse(&data).unwrap();
        let view = coded.view(&data).unwrap();
        let (layout, shape) = (coded.layout(), coded.layout().shape());
        let sizes = [shape.experts, shape.rows, shape.columns].map(|size| Value::from(size as u64));
        assert_eq!(case["shape"].as_array().unwrap()[..], sizes, "{name}");
        assert_eq!(case["ndim"], u64::from(shape.ndim), "{name}");
        assert_eq!(case["stream_rows"], layout.stream_rows() as u64, "{name}");
        for (row, scale) in scales.iter().enumerate() {
            assert_eq!(view.scale(row), *scale, "{name}");
        }
        for isa in Isa::all_available() {
            assert!(codes(&data, isa) == wanted, "{name} on {}", isa.name());
        }
        let rows = Some(layout.stream_rows());
        let pool = pool::current().unwrap();
        let symbols = layout.symbols();
        assert_eq!(case["symbols"], symbols.to_string(), "{name}");
        let again = coded::encode(&wanted, &scales, shape, rows, symbols, &pool).unwrap();
        assert!(codes(&again, Isa::SCALAR) == wanted, "{name}");
    }
}
