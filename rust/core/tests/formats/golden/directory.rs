//! The packed tensors of a golden directory, located through its shard's own header, decode to the original values.

use moepack_core::formats::ternary::{self, TernaryView};
use moepack_core::pool;

use super::{floats, json, read};

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
    let manifest = json(&read("directory-v1/moepack.json"));
    let expected = json(&read("directory-v1.json"));
    let packed = expected["packed"].as_object().unwrap();
    assert_eq!(packed.len(), 3);
    for (name, content) in packed {
        let file = manifest["tensors"][name]["file"].as_str().unwrap();
        let file = read(&format!("directory-v1/{file}"));
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
        assert_eq!(levels, floats(&content["levels"]), "{name}");
    }
}
