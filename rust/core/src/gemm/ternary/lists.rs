//! Rows as lists of their non-zero weights, for many tokens and all codes.
//!
//! A row is decoded once, and its list is multiplied by each token block. An item is `2 * position`, plus one for
//! symbol 2. For arbitrary codes, positions are below [`position_bound`], up to which tiles hold zeros after the last
//! column.

use crate::formats::ternary::{Row, TernaryView};

use super::table::{ListTable, longest_word};

/// An upper bound of the positions of all items of the rows of `view`, for arbitrary bytes.
pub(super) fn position_bound(view: &TernaryView) -> usize {
    view.columns() + longest_word(view)
}

/// The non-zero weights of a row.
#[derive(Default)]
pub(super) struct List {
    /// The buffer of items; the first `count` are used.
    items: Vec<u32>,
    count: usize,
    swapped: bool,
}

impl List {
    /// The items in order.
    pub fn items(&self) -> &[u32] {
        &self.items[..self.count]
    }

    /// The level of items with lowest bit 0, and of those with lowest bit 1.
    pub fn levels(&self, (negative, positive): (f32, f32)) -> [f32; 2] {
        match self.swapped {
            false => [negative, positive],
            true => [positive, negative],
        }
    }

    /// Decodes a row of `view`.
    pub fn fill(&mut self, view: &TernaryView, row: Row) {
        self.swapped = matches!(row, Row::Fsv8 { swapped: true, .. });
        self.count = 0;
        let columns = view.columns();
        match row {
            Row::Zero => {}
            Row::Raw(bytes) => self.fill_raw(bytes),
            Row::Fsv8 {
                codes, dictionary, ..
            } => {
                let table = ListTable::fsv8(usize::from(view.dictionaries()[dictionary]));
                match (table, table.class_bits()) {
                    (ListTable::Two(table, _), 2) => {
                        self.fill_two(indices::<2>(codes), &table[..1 << 10], columns)
                    }
                    (ListTable::Two(table, _), _) => {
                        self.fill_two(indices::<3>(codes), &table[..1 << 11], columns)
                    }
                    (ListTable::Three(table, _), 2) => {
                        self.fill_three(indices::<2>(codes), &table[..1 << 10], columns)
                    }
                    (ListTable::Three(table, _), _) => {
                        self.fill_three(indices::<3>(codes), &table[..1 << 11], columns)
                    }
                }
            }
            Row::Dict16(bytes) => {
                let (words, _) = bytes.as_chunks::<2>();
                let indices = words.iter().map(|&word| usize::from(u16::from_le_bytes(word)));
                if let ListTable::Three(table, _) = ListTable::dict16() {
                    self.fill_three(indices, &table[..1 << 16], columns);
                }
            }
        }
    }

    /// A buffer of `most` items, as a slice because writes to the vector make the compiler reload its header every
    /// time.
    fn room(&mut self, most: usize) -> &mut [u32] {
        if self.items.len() < most {
            self.items.resize(most, 0);
        }
        &mut self.items[..most]
    }

    /// Decodes words of two slots. No branch depends on a code: both slots are written, and the next word overwrites
    /// unused ones.
    #[inline(always)]
    fn fill_two(&mut self, indices: impl ExactSizeIterator<Item = usize>, table: &[u64], columns: usize) {
        let items = self.room(2 * indices.len() + 2);
        // A position, as twice its number, in both halves.
        const BOTH: u64 = 2 | 2 << 32;
        let end = columns as u64 * BOTH;
        let (mut count, mut at) = (0, 0);
        for index in indices {
            let entry = table[index];
            let word = (entry & 0xffff_0000_ffff) + at;
            items[count..count + 2].copy_from_slice(&[word as u32, (word >> 32) as u32]);
            count += (entry >> 16 & 3) as usize;
            at = (at + (entry >> 24 & 255) * BOTH).min(end);
        }
        self.count = count;
    }

    /// Decodes words of three slots.
    #[inline(always)]
    fn fill_three(&mut self, indices: impl ExactSizeIterator<Item = usize>, table: &[u32], columns: usize) {
        let items = self.room(3 * indices.len() + 3);
        let end = 2 * columns as u32;
        let (mut count, mut at) = (0, 0);
        for index in indices {
            let entry = table[index];
            let slots = [entry & 127, entry >> 7 & 127, entry >> 14 & 127].map(|slot| slot + at);
            items[count..count + 3].copy_from_slice(&slots);
            count += (entry >> 21 & 3) as usize;
            at = (at + (entry >> 24) * 2).min(end);
        }
        self.count = count;
    }

    fn fill_raw(&mut self, bytes: &[u8]) {
        let items = self.room(4 * bytes.len() + 1);
        let mut count = 0;
        for (i, &byte) in bytes.iter().enumerate() {
            for place in 0..4 {
                let symbol = byte >> (2 * place) & 3;
                items[count] = 2 * (4 * i + place) as u32 + u32::from(symbol == 2);
                count += usize::from(symbol == 1 || symbol == 2);
            }
        }
        self.count = count;
    }
}

/// The table indices of a row's codes, with CLASS class bits.
#[inline(always)]
fn indices<const CLASS: usize>(codes: &[u8]) -> impl ExactSizeIterator<Item = usize> {
    let mut previous = 0;
    codes.iter().map(move |&code| {
        let index = usize::from(code) << CLASS | usize::from(previous) >> (8 - CLASS);
        previous = code;
        index
    })
}
