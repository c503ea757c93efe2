//! Rebuilds the embedded dictionaries of FSV8 from JSON, the form that the search writes.
//!
//! ```text
//! cargo run --release -p moepack-core --example fsv8_pack -- dictionaries.json rust/core/src/ternary/fsv8/dictionaries.bin
//! ```

use std::error::Error;

use moepack_core::ternary::fsv8::dictionary::{CODES, Dictionary, Word, write_all};
use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let [input, output] = std::env::args()
        .skip(1)
        .collect::<Vec<_>>()
        .try_into()
        .map_err(|_| "usage: fsv8_pack JSON BIN")?;
    let json: Value = serde_json::from_str(&std::fs::read_to_string(input)?)?;
    let list = json["dictionaries"].as_array().ok_or("no list of dictionaries")?;
    let dictionaries = list
        .iter()
        .map(|d| dictionary(d).ok_or("malformed dictionary"))
        .collect::<Result<Vec<_>, _>>()?;
    std::fs::write(output, write_all(&dictionaries))?;
    Ok(())
}

fn dictionary(json: &Value) -> Option<Dictionary> {
    let scaled = |name: &str, by: f64| json[name].as_f64().map(|x| (x * by).round());
    let small = |value: &Value| value.as_u64().and_then(|n| u8::try_from(n).ok());
    Some(Dictionary {
        p0_thousandths: scaled("p0", 1e3)? as u16,
        share_thousandths: scaled("p1_share", 1e3)? as u16,
        expected_length: scaled("expected_weights_per_code", 1e4)? as u32,
        max_nonzeros: small(&json["nonzeros_per_word"])?,
        class_bits: small(&json["class_bits"])?,
        promises: json["states"]
            .as_array()?
            .iter()
            .map(|d| if d.is_null() { Some(0) } else { small(d) })
            .collect::<Option<_>>()?,
        class_sizes: json["class_sizes"]
            .as_array()?
            .iter()
            .map(|n| n.as_u64().map(|n| n as u16))
            .collect::<Option<_>>()?,
        words: json["words"]
            .as_array()?
            .iter()
            .map(words)
            .collect::<Option<_>>()?,
    })
}

fn words(json: &Value) -> Option<Vec<Option<Word>>> {
    let mut words = vec![None; CODES];
    for entry in json.as_array()? {
        let symbols: Vec<u8> = entry[1].as_str()?.bytes().map(|digit| digit - b'0').collect();
        *words.get_mut(entry[0].as_u64()? as usize)? = Some(Word::from_symbols(&symbols)?);
    }
    Some(words)
}
