//! Searches FSV8 dictionaries, and writes them as the bytes that the core embeds and as readable JSON.

mod chain;
pub mod json;
pub mod search;
mod source;
mod splits;
mod tree;

use moepack_core::formats::ternary::fsv8::{Dictionary, Word};

/// Writes dictionaries as the bytes that [`read_all`](moepack_core::formats::ternary::fsv8::dictionary::read_all) reads.
pub fn write_all(dictionaries: &[Dictionary]) -> Vec<u8> {
    let mut out = Vec::new();
    for dictionary in dictionaries {
        write(dictionary, &mut out);
    }
    out
}

fn write(dictionary: &Dictionary, out: &mut Vec<u8>) {
    out.extend(dictionary.p0_thousandths.to_le_bytes());
    out.extend(dictionary.share_thousandths.to_le_bytes());
    out.extend(dictionary.expected_length.to_le_bytes());
    out.extend([
        dictionary.max_nonzeros,
        dictionary.class_bits,
        dictionary.states() as u8,
        0,
    ]);
    out.extend(&dictionary.promises);
    out.extend(dictionary.class_sizes.iter().flat_map(|size| size.to_le_bytes()));
    for word in dictionary.words.iter().flatten() {
        match word {
            Some(word) => write_word(*word, out),
            None => out.push(0),
        }
    }
}

fn write_word(word: Word, out: &mut Vec<u8>) {
    let symbols = word
        .nonzeros()
        .enumerate()
        .fold(0, |symbols, (i, (_, symbol))| symbols | symbol << (2 * i));
    out.extend([word.length, (word.nonzeros().count() as u8) << 6 | symbols]);
    out.extend(word.nonzeros().map(|(position, _)| position));
}
