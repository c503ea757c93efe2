//! The lookup table of a decoder: one entry per pair of a code and the class of the previous code.
//!
//! The table is total: an index that no valid row can produce holds an entry of length 1 without non-zeros. A kernel
//! that decodes damaged bytes therefore advances by a bounded number of weights and never reads outside the table.

use std::sync::OnceLock;

use super::dictionary::{CODES, COUNT, Dictionary, Word};

/// The entry of an index that no valid row produces.
const IMPOSSIBLE: u32 = 1 << 24;

/// A decoding table. The entry of a code is `entries[(code << s) | (previous_code >> (8 - s))]` with `s = class_bits`;
/// the code before the first of a row counts as 0.
///
/// ```text
/// two slots:   position 1 :8 | position 2 :8 | type 1 :2 @16 | type 2 :2 @18 | length :8 @24
/// three slots: position 1 :5 | position 2 :5 | position 3 :5 | type 1 :2 @16 | type 2 :2 @18 | type 3 :2 @20 | length :8 @24
/// ```
///
/// A type is 1 or 2, the symbol of the non-zero weight at that position of the word; type 0 is an unused slot, whose
/// position is 0. Positions count from the word's first weight and are less than its length.
#[derive(Debug, Clone)]
pub struct Lut {
    /// The 256 << `class_bits` entries.
    pub entries: Vec<u32>,
    /// The number of top bits of the previous code that select its class: 2 or 3.
    pub class_bits: u32,
    /// Whether entries have three slots of 5-bit positions instead of two slots of 8-bit positions.
    pub three_slots: bool,
    /// The largest length of any entry, at most 255.
    pub max_length: u32,
    possible: Vec<bool>,
    /// The number of codes of class 0, after which a row may end.
    ending_codes: usize,
}

impl Lut {
    /// Builds the table of a dictionary.
    pub fn new(dictionary: &Dictionary) -> Lut {
        let class_bits = u32::from(dictionary.class_bits);
        let three_slots = dictionary.max_nonzeros == 3;
        let mut entries = vec![IMPOSSIBLE; CODES << class_bits];
        let mut possible = vec![false; CODES << class_bits];
        for class in 0..1 << class_bits {
            let state = dictionary.class_of((class << (8 - class_bits)) as u8);
            for (code, word) in dictionary.words[state].iter().enumerate() {
                let Some(word) = word else { continue };
                let index = code << class_bits | class;
                entries[index] = entry(word, three_slots);
                possible[index] = true;
            }
        }
        Lut {
            entries,
            class_bits,
            three_slots,
            max_length: u32::from(dictionary.max_length()),
            possible,
            ending_codes: usize::from(dictionary.class_sizes[0]),
        }
    }

    /// Returns the table of an embedded dictionary, which is built on first use.
    ///
    /// # Panics
    /// If `id` is not below [`COUNT`]; a parsed tensor never names such a dictionary.
    pub fn embedded(id: usize) -> &'static Lut {
        static ALL: [OnceLock<Lut>; COUNT] = [const { OnceLock::new() }; COUNT];
        ALL[id].get_or_init(|| Lut::new(&Dictionary::all()[id]))
    }

    /// The index of a code after `previous` (0 for the first code of a row).
    #[inline(always)]
    pub fn index(&self, code: u8, previous: u8) -> usize {
        usize::from(code) << self.class_bits | usize::from(previous) >> (8 - self.class_bits)
    }

    /// Returns whether a valid row can produce an index.
    #[inline(always)]
    pub fn possible(&self, index: usize) -> bool {
        self.possible[index]
    }

    /// Returns whether a row may end after a code, that is, whether the next state is 0.
    #[inline(always)]
    pub fn ends_row(&self, code: u8) -> bool {
        usize::from(code) < self.ending_codes
    }
}

/// The table entry of a word.
fn entry(word: &Word, three_slots: bool) -> u32 {
    let position_bits = if three_slots { 5 } else { 8 };
    word.nonzeros().enumerate().fold(
        u32::from(word.length) << 24,
        |entry, (slot, (position, symbol))| {
            entry | u32::from(position) << (position_bits * slot) | u32::from(symbol) << (16 + 2 * slot)
        },
    )
}

/// The non-zero weights of an entry: (position, symbol).
#[inline(always)]
pub fn nonzeros(entry: u32, three_slots: bool) -> impl Iterator<Item = (usize, u8)> {
    let (bits, slots) = if three_slots { (5, 3) } else { (8, 2) };
    (0..slots).filter_map(move |slot| {
        let symbol = (entry >> (16 + 2 * slot) & 3) as u8;
        let position = (entry >> (bits * slot)) as usize & ((1 << bits) - 1);
        (symbol != 0).then_some((position, symbol))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_of_every_table_is_bounded() {
        for id in 0..COUNT {
            let lut = Lut::embedded(id);
            assert_eq!(lut.entries.len(), 256 << lut.class_bits);
            for (index, &entry) in lut.entries.iter().enumerate() {
                let length = entry >> 24;
                assert!((1..=lut.max_length).contains(&length));
                assert!(nonzeros(entry, lut.three_slots).all(|(position, _)| position < length as usize));
                assert!(lut.possible(index) || entry == IMPOSSIBLE);
            }
        }
    }

    #[test]
    fn entries_equal_the_words() {
        for (id, dictionary) in Dictionary::all().iter().enumerate() {
            let lut = Lut::embedded(id);
            for previous in [0, 100, 200, 255] {
                let words = &dictionary.words[dictionary.class_of(previous)];
                for (code, word) in words.iter().enumerate() {
                    let index = lut.index(code as u8, previous);
                    assert_eq!(lut.possible(index), word.is_some());
                    let Some(word) = word else { continue };
                    assert_eq!(lut.entries[index] >> 24, u32::from(word.length));
                    let listed = nonzeros(lut.entries[index], lut.three_slots);
                    assert!(
                        listed.eq(word
                            .nonzeros()
                            .map(|(position, symbol)| (usize::from(position), symbol)))
                    );
                }
            }
        }
    }
}
