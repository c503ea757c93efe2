//! The packed tensors of a golden directory, located through its shard's own header, decode to the original values.

use std::fs;
use std::path::PathBuf;

use moepack_core::formats::ternary::{self, TernaryView};
use moepack_core::pool;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")).join(name)
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// The bytes of a tensor in a safetensors file, and where they start.
fn tensor<'a>(file: &'a [u8], name: &str) -> (usize, &'a [u8]) {
    let header_bytes = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let entry = &json(&file[8..8 + header_bytes])[name];
    let offset = |i: usize| 8 + header_bytes + entry["data_offsets"][i].as_u64().unwrap() as usize;
    (offset(0), &file[offset(0)..offset(1)])
}

#[test]
fn version_1_decodes() {
    let pool = pool::current().unwrap();
    let manifest = json(&fs::read(golden("directory-v1/moepack.json")).unwrap());
    let expected = json(&fs::read(golden("directory-v1.json")).unwrap());
    let packed = expected["packed"].as_object().unwrap();
    assert_eq!(packed.len(), 3);
    for (name, content) in packed {
        let file = manifest["tensors"][name]["file"].as_str().unwrap();
        let file = fs::read(golden("directory-v1").join(file)).unwrap();
        let (start, bytes) = tensor(&file, name);
        assert_eq!(start % 64, 0, "{name}");
        let view = TernaryView::parse(bytes).unwrap();
        view.verify(&pool).unwrap();
        let shape = [view.experts(), view.rows(), view.columns()];
        assert_eq!(serde_json::to_value(shape).unwrap(), content["shape"], "{name}");
        let mut codes = vec![0; shape.iter().product()];
        ternary::decode_codes(&view, &mut codes, &pool).unwrap();
        let text: String = codes
            .iter()
            .map(|&code| ['-', '0', '+'][(code + 1) as usize])
            .collect();
        let rows = content["rows"].as_array().unwrap();
        let written: String = rows.iter().map(|row| row.as_str().unwrap()).collect();
        assert_eq!(text, written, "{name}");
        let levels: Vec<_> = (0..rows.len())
            .map(|row| view.levels(row))
            .flat_map(|(a, b)| [a, b])
            .collect();
        let written = content["levels"].as_array().unwrap().iter();
        let written: Vec<_> = written.map(|level| level.as_f64().unwrap() as f32).collect();
        assert_eq!(levels, written, "{name}");
    }
}
