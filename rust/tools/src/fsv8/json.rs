//! Dictionaries as readable JSON, the output of the search.

use moepack_core::formats::ternary::fsv8::dictionary::{CODES, Dictionary, Word};
use serde_json::{Value, json};

const NOTE: &str = "FSV8 dictionaries: words[state] = list of [code, string of weights, next state]; states[0] = null \
                    promises nothing, a number d promises that the next d weights are not all zero. The next state is \
                    the class of the code: classes are consecutive ranges of class_sizes codes, so that the top \
                    class_bits bits of a code name its class.";

/// Writes dictionaries.
pub fn write(dictionaries: &[Dictionary]) -> String {
    let list: Vec<Value> = dictionaries.iter().map(to_value).collect();
    json!({ "note": NOTE, "dictionaries": list }).to_string()
}

/// Reads dictionaries; `None` if the text does not hold any.
pub fn read(text: &str) -> Option<Vec<Dictionary>> {
    let value: Value = serde_json::from_str(text).ok()?;
    value["dictionaries"].as_array()?.iter().map(from_value).collect()
}

fn to_value(dictionary: &Dictionary) -> Value {
    let words = |words: &Vec<Option<Word>>| -> Vec<Value> {
        let used = words
            .iter()
            .enumerate()
            .filter_map(|(code, word)| word.map(|word| (code, word)));
        used.map(|(code, word)| json!([code, text(word), dictionary.class_of(code as u8)]))
            .collect()
    };
    json!({
        "p0": f64::from(dictionary.p0_thousandths) / 1e3,
        "p1_share": f64::from(dictionary.share_thousandths) / 1e3,
        "nonzeros_per_word": dictionary.max_nonzeros,
        "class_bits": dictionary.class_bits,
        "states": dictionary.promises.iter().map(|&d| (d > 0).then_some(d)).collect::<Vec<_>>(),
        "class_sizes": dictionary.class_sizes,
        "expected_weights_per_code": f64::from(dictionary.expected_length) / 1e4,
        "words": dictionary.words.iter().map(words).collect::<Vec<_>>(),
    })
}

fn text(word: Word) -> String {
    word.symbols()
        .into_iter()
        .map(|symbol| char::from(b'0' + symbol))
        .collect()
}

fn from_value(value: &Value) -> Option<Dictionary> {
    let scaled = |name: &str, by: f64| value[name].as_f64().map(|x| (x * by).round());
    let promise = |d: &Value| if d.is_null() { Some(0) } else { number(d) };
    let dictionary = Dictionary {
        p0_thousandths: scaled("p0", 1e3)? as u16,
        share_thousandths: scaled("p1_share", 1e3)? as u16,
        expected_length: scaled("expected_weights_per_code", 1e4)? as u32,
        max_nonzeros: number(&value["nonzeros_per_word"])?,
        class_bits: number(&value["class_bits"])?,
        promises: value["states"]
            .as_array()?
            .iter()
            .map(promise)
            .collect::<Option<_>>()?,
        class_sizes: value["class_sizes"]
            .as_array()?
            .iter()
            .map(number)
            .collect::<Option<_>>()?,
        words: Vec::new(),
    };
    let words = value["words"]
        .as_array()?
        .iter()
        .map(|list| words(list, &dictionary))
        .collect::<Option<_>>()?;
    Some(Dictionary { words, ..dictionary })
}

fn number<T: TryFrom<u64>>(value: &Value) -> Option<T> {
    T::try_from(value.as_u64()?).ok()
}

/// The words of a state; `None` also if a next state is not the class of its code.
fn words(list: &Value, dictionary: &Dictionary) -> Option<Vec<Option<Word>>> {
    let mut words = vec![None; CODES];
    for entry in list.as_array()? {
        let symbols: Option<Vec<u8>> = entry[1]
            .as_str()?
            .bytes()
            .map(|digit| digit.checked_sub(b'0'))
            .collect();
        let code: u8 = number(&entry[0])?;
        words[usize::from(code)] = Some(Word::from_symbols(&symbols?)?);
        (number(&entry[2]) == Some(dictionary.class_of(code))).then_some(())?;
    }
    Some(words)
}
