//! The embedded dictionaries equal their readable form.

use moepack_core::formats::ternary::fsv8::Dictionary;
use moepack_tools::fsv8::{json, write_all};

/// Names a JSON file to compare with the embedded dictionaries.
const VARIABLE: &str = "MOEPACK_FSV8_JSON";

#[test]
fn the_embedded_dictionaries_are_written_back_as_the_same_bytes() {
    let embedded = include_bytes!("../../core/src/formats/ternary/fsv8/dictionaries.bin");
    assert!(write_all(Dictionary::all()) == embedded);
}

#[test]
fn dictionaries_survive_json() {
    assert_eq!(
        json::read(&json::write(Dictionary::all())).as_deref(),
        Some(Dictionary::all())
    );
}

#[test]
fn malformed_json_is_refused() {
    let text = json::write(&Dictionary::all()[24..25]);
    assert!(json::read(&text[..text.len() / 2]).is_none());
    assert!(json::read(&text.replace("\"words\"", "\"strings\"")).is_none());
    assert!(json::read(&text.replacen(",0]", ",1]", 1)).is_none());
}

#[test]
fn the_embedded_dictionaries_match_the_search() {
    let Some(path) = std::env::var_os(VARIABLE) else {
        eprintln!("skipped: {VARIABLE} is not set");
        return;
    };
    let text = std::fs::read_to_string(path).unwrap();
    assert_eq!(json::read(&text).as_deref(), Some(Dictionary::all()));
}
