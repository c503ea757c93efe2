//! Decoding tables of the kernels, derived from the format's tables ([`Lut`]) on first use.
//!
//! # For one token ([`StepTable`])
//! The tile holds three floats per position: `0, 0, x` (see [`super::tile`]). The two floats at `3 p + 2` are (x_p,
//! 0), at `3 p + 1` they are (0, x_p) and at `3 p` (0, 0), so that one load and one addition put x_p into the sum of
//! the negative weights, of the positive ones, or nowhere. An entry holds these offsets, relative to the word's first
//! position, and the distance by which the word advances the pointer into the tile:
//!
//! ```text
//! two slots:   offset 1 :8 | offset 2 :8 | bytes to the next word :16
//! three slots: offset 1 :8 | offset 2 :8 | offset 3 :8 | length in weights :8
//! ```
//!
//! # For 2 to 32 tokens ([`BlockTable`])
//! Offsets are those of a position's values, in bytes, in a tile of L lanes; types select the level from (0, symbol
//! 1, symbol 2). An unused slot of type 0 repeats the offset of slot 1, which is in the cache.
//!
//! ```text
//! offset 1 :16 | offset 2 :16
//! type 1 :8 | type 2 :8 | bytes to the next word :16
//! ```
//!
//! # For lists ([`ListTable`])
//! A slot is an item of [`super::lists`]: twice the position in the word, plus one for symbol 2.
//!
//! ```text
//! two slots:   item 1 :16 | non-zeros :8 | length :8 | item 2 :16 | 0 :16
//! three slots: item 1 :7 | item 2 :7 | item 3 :7 | non-zeros :3 | length :8
//! ```

use std::sync::OnceLock;

use crate::formats::ternary::fsv8::dictionary::COUNT;
use crate::formats::ternary::fsv8::{Lut, lut};
use crate::formats::ternary::{Code, TernaryView, dict16};

/// The floats of each position in the tile of one token.
pub(super) const STEP: usize = 3;

/// An upper bound of the length of all words, in weights.
const MAX_LENGTH: usize = 255;

/// A table for one token, with the indices of [`Lut`] or the codes of dict16.
#[derive(Debug)]
pub(super) struct StepTable {
    pub entries: Vec<u32>,
    pub three_slots: bool,
    /// The class bits of the index, 2 or 3; 0 for dict16.
    pub class_bits: u32,
}

impl StepTable {
    fn new(entries: &[u32], three_slots: bool, class_bits: u32) -> StepTable {
        let entries = entries
            .iter()
            .map(|&entry| step_entry(entry, three_slots))
            .collect();
        StepTable {
            entries,
            three_slots,
            class_bits,
        }
    }

    /// The table of an embedded FSV8 dictionary.
    pub fn fsv8(id: usize) -> &'static StepTable {
        static ALL: [OnceLock<StepTable>; COUNT] = [const { OnceLock::new() }; COUNT];
        ALL[id].get_or_init(|| {
            let lut = Lut::embedded(id);
            StepTable::new(&lut.entries, lut.three_slots, lut.class_bits)
        })
    }

    /// The table of the paper's dictionary.
    pub fn dict16() -> &'static StepTable {
        static TABLE: OnceLock<StepTable> = OnceLock::new();
        TABLE.get_or_init(|| StepTable::new(dict16::sparse(), true, 0))
    }
}

fn step_entry(entry: u32, three_slots: bool) -> u32 {
    let length = entry >> 24;
    let offsets =
        lut::nonzeros(entry, three_slots)
            .enumerate()
            .fold(0, |offsets, (slot, (position, symbol))| {
                let offset = STEP * position + STEP - usize::from(symbol);
                assert!(
                    offset < 256,
                    "a word's last non-zero is too far for an 8-bit offset"
                );
                offsets | (offset as u32) << (8 * slot)
            });
    match three_slots {
        true => offsets | length << 24,
        false => offsets | (length * STEP as u32 * 4) << 16,
    }
}

/// A two-slot table for a block of tokens.
#[derive(Debug)]
pub(super) struct BlockTable {
    /// The entries as two words, whose fields take fewer instructions to extract than those of one 64-bit word.
    pub entries: Vec<[u32; 2]>,
    pub class_bits: u32,
}

impl BlockTable {
    /// The numbers of lanes that have tables.
    const LANES: [usize; 4] = [4, 8, 16, 32];

    /// The table of an embedded FSV8 dictionary for blocks of `lanes` tokens; `None` if its words do not have two
    /// slots.
    pub fn fsv8(id: usize, lanes: usize) -> Option<&'static BlockTable> {
        static ALL: [[OnceLock<BlockTable>; COUNT]; 4] = [const { [const { OnceLock::new() }; COUNT] }; 4];
        let size = BlockTable::LANES.iter().position(|&l| l == lanes)?;
        let lut = Lut::embedded(id);
        (!lut.three_slots).then(|| {
            ALL[size][id].get_or_init(|| BlockTable {
                entries: lut.entries.iter().map(|&e| block_entry(e, lanes)).collect(),
                class_bits: lut.class_bits,
            })
        })
    }
}

fn block_entry(entry: u32, lanes: usize) -> [u32; 2] {
    let bytes = (4 * lanes) as u32;
    let slots: Vec<(usize, u8)> = lut::nonzeros(entry, false).collect();
    let (first, symbol_1) = slots.first().copied().unwrap_or((0, 0));
    let (second, symbol_2) = slots.get(1).copied().unwrap_or((first, 0));
    // All fields hold at most 255 * 32 * 4 < 2^16.
    [
        (first as u32 * bytes) | (second as u32 * bytes) << 16,
        u32::from(symbol_1) | u32::from(symbol_2) << 8 | ((entry >> 24) * bytes) << 16,
    ]
}

/// A table for lists, with its class bits (0 for dict16).
#[derive(Debug)]
pub(super) enum ListTable {
    Two(Vec<u64>, u32),
    Three(Vec<u32>, u32),
}

impl ListTable {
    /// The table of an embedded FSV8 dictionary.
    pub fn fsv8(id: usize) -> &'static ListTable {
        static ALL: [OnceLock<ListTable>; COUNT] = [const { OnceLock::new() }; COUNT];
        ALL[id].get_or_init(|| {
            let Lut {
                entries, class_bits, ..
            } = Lut::embedded(id);
            match Lut::embedded(id).three_slots {
                false => ListTable::Two(entries.iter().map(|&e| two_items(e)).collect(), *class_bits),
                true => ListTable::Three(entries.iter().map(|&e| three_items(e)).collect(), *class_bits),
            }
        })
    }

    /// The table of the paper's dictionary, whose words have three slots.
    pub fn dict16() -> &'static ListTable {
        static TABLE: OnceLock<ListTable> = OnceLock::new();
        TABLE.get_or_init(|| ListTable::Three(dict16::sparse().iter().map(|&e| three_items(e)).collect(), 0))
    }

    /// The class bits of the index, 2 or 3; 0 for dict16.
    pub fn class_bits(&self) -> u32 {
        match self {
            ListTable::Two(_, bits) | ListTable::Three(_, bits) => *bits,
        }
    }
}

/// The items of an entry, with zeros for unused ones, and their number.
fn items(entry: u32, three_slots: bool) -> ([u32; 3], u32) {
    let (mut items, mut count) = ([0; 3], 0);
    for (position, symbol) in lut::nonzeros(entry, three_slots) {
        items[count] = 2 * position as u32 + u32::from(symbol) - 1;
        count += 1;
    }
    (items, count as u32)
}

fn two_items(entry: u32) -> u64 {
    let ([first, second, _], count) = items(entry, false);
    u64::from(first | count << 16 | entry >> 24 << 24) | u64::from(second) << 32
}

fn three_items(entry: u32) -> u32 {
    let ([first, second, third], count) = items(entry, true);
    first | second << 7 | third << 14 | count << 21 | entry >> 24 << 24
}

/// The maximum number of weights that a code of a tensor may stand for, valid or not; raw bytes count as words of 4.
pub(super) fn longest_word(view: &TernaryView) -> usize {
    let longest = match view.code() {
        Code::Fsv8 => {
            let lengths = view
                .dictionaries()
                .iter()
                .map(|&id| Lut::embedded(usize::from(id)).max_length);
            lengths.max().unwrap_or(0).max(4) as usize
        }
        Code::Dict16 => 2 * dict16::MAX_PAIRS,
    };
    debug_assert!(longest <= MAX_LENGTH);
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The symbols encoded by the offsets of an entry of a step table.
    fn replay(offsets: &[u32], length: usize) -> Vec<u8> {
        let mut string = vec![0; length];
        for &offset in offsets.iter().filter(|&&offset| offset != 0) {
            let (position, symbol) = (
                (offset as usize - 1) / STEP,
                STEP - (offset as usize - 1) % STEP - 1,
            );
            string[position] = symbol as u8;
        }
        string
    }

    fn symbols(entry: u32, three_slots: bool) -> Vec<u8> {
        let mut string = vec![0; (entry >> 24) as usize];
        lut::nonzeros(entry, three_slots).for_each(|(position, symbol)| string[position] = symbol);
        string
    }

    #[test]
    fn step_tables_equal_the_tables_of_the_format() {
        for id in 0..COUNT {
            let (lut, table) = (Lut::embedded(id), StepTable::fsv8(id));
            assert_eq!(lut.entries.len(), table.entries.len());
            for (&expected, &entry) in lut.entries.iter().zip(&table.entries) {
                let (offsets, length) = match table.three_slots {
                    true => (
                        vec![entry & 255, entry >> 8 & 255, entry >> 16 & 255],
                        entry >> 24,
                    ),
                    false => (vec![entry & 255, entry >> 8 & 255], (entry >> 16) / 12),
                };
                assert_eq!(
                    replay(&offsets, length as usize),
                    symbols(expected, lut.three_slots)
                );
            }
        }
    }

    #[test]
    fn list_tables_equal_the_tables_of_the_format() {
        let check = |expected: u32, three_slots, items: &[u32], length| {
            let mut string = vec![0; length as usize];
            items
                .iter()
                .for_each(|item| string[(item >> 1) as usize] = (item & 1) as u8 + 1);
            assert_eq!(string, symbols(expected, three_slots));
        };
        let three = |expected: u32, e: u32| {
            let items = [e & 127, e >> 7 & 127, e >> 14 & 127];
            check(expected, true, &items[..(e >> 21 & 7) as usize], e >> 24);
        };
        for id in 0..COUNT {
            let expected = Lut::embedded(id).entries.iter();
            match ListTable::fsv8(id) {
                ListTable::Two(table, _) => expected.zip(table).for_each(|(&expected, &e)| {
                    let items = [e as u32 & 0xffff, (e >> 32) as u32];
                    check(
                        expected,
                        false,
                        &items[..(e >> 16 & 255) as usize],
                        (e >> 24) as u32 & 255,
                    );
                }),
                ListTable::Three(table, _) => {
                    expected.zip(table).for_each(|(&expected, &e)| three(expected, e))
                }
            }
        }
        if let ListTable::Three(table, _) = ListTable::dict16() {
            dict16::sparse()
                .iter()
                .zip(table)
                .for_each(|(&expected, &e)| three(expected, e));
        }
    }

    #[test]
    fn block_tables_equal_the_tables_of_the_format() {
        for id in 0..COUNT {
            for lanes in BlockTable::LANES {
                let lut = Lut::embedded(id);
                let Some(table) = BlockTable::fsv8(id, lanes) else {
                    assert!(lut.three_slots);
                    continue;
                };
                for (&expected, &[offsets, rest]) in lut.entries.iter().zip(&table.entries) {
                    let bytes = 4 * lanes as u32;
                    let mut string = vec![0; ((rest >> 16) / bytes) as usize];
                    for (offset, symbol) in [(offsets & 0xffff, rest & 255), (offsets >> 16, rest >> 8 & 255)]
                    {
                        if symbol != 0 {
                            string[(offset / bytes) as usize] = symbol as u8;
                        }
                    }
                    assert_eq!(string, symbols(expected, false));
                }
            }
        }
    }
}
