//! Golden files (`tests/golden`) remain readable, and encoding gives the same bytes.

mod channels;
mod codebook;
mod coded;
mod compensated;
mod directory;
mod groupwise;
mod ternary;

use std::fs;

use serde_json::Value;

/// The bytes of a golden file, for example `coded/plain.bin`.
fn read(path: &str) -> Vec<u8> {
    fs::read(format!(
        "{}/../../tests/golden/{path}",
        env!("CARGO_MANIFEST_DIR")
    ))
    .unwrap()
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// The content of a format's golden tensors.
fn cases(format: &str) -> Vec<Value> {
    let cases = json(&read(&format!("{format}/cases.json")));
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    cases.clone()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn list<T>(value: &Value, read: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap().iter().map(read).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    list(value, |x| x.as_f64().unwrap() as f32)
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}
