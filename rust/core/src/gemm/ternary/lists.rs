//! Rows as lists of positions: where the weights are negative and where they are positive.
//!
//! The form that every code of a row decodes to, and the one that many tokens share: a row is decoded once and its
//! lists are run over each block of tokens. Positions never exceed the number of columns, whatever the codes are; the
//! position that equals it stands for nothing, and tiles hold zeros there.

use crate::ternary::fsv8::Lut;
use crate::ternary::{Row, TernaryView, dict16};

/// The positions of a row's non-zero weights.
#[derive(Default)]
pub(super) struct Lists {
    /// Places for positions; those behind the counts are unused. Index 0: negative, 1: positive.
    places: [Vec<u32>; 2],
    counts: [usize; 2],
    end: u32,
}

impl Lists {
    /// Where the weights are negative.
    pub fn negative(&self) -> &[u32] {
        &self.places[0][..self.counts[0]]
    }

    /// Where the weights are positive.
    pub fn positive(&self) -> &[u32] {
        &self.places[1][..self.counts[1]]
    }

    /// The number of columns, which no position exceeds.
    pub fn end(&self) -> usize {
        self.end as usize
    }

    /// Decodes a row of `view`.
    pub fn fill(&mut self, view: &TernaryView, row: Row) {
        self.counts = [0; 2];
        let end = view.columns() as u32;
        self.end = end;
        match row {
            Row::Zero => {}
            Row::Raw(bytes) => self.fill_raw(bytes, end),
            Row::Fsv8 {
                codes,
                dictionary,
                swapped,
            } => {
                let lut = Lut::embedded(usize::from(view.dictionaries()[dictionary]));
                let mut previous = 0;
                let entries = codes.iter().map(|&code| {
                    let entry = lut.entries[lut.index(code, previous)];
                    previous = code;
                    entry
                });
                match lut.three_slots {
                    false => self.fill_words::<2, 8>(entries, codes.len(), end),
                    true => self.fill_words::<3, 5>(entries, codes.len(), end),
                }
                if swapped {
                    self.places.swap(0, 1);
                    self.counts.swap(0, 1);
                }
            }
            Row::Dict16(bytes) => {
                let sparse = dict16::sparse();
                let codes = bytes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]]));
                self.fill_words::<3, 5>(codes.map(|code| sparse[usize::from(code)]), bytes.len() / 2, end);
            }
        }
    }

    fn reserve(&mut self, most: usize) {
        for places in &mut self.places {
            if places.len() < most {
                places.resize(most, 0);
            }
        }
    }

    /// Appends the non-zeros of `words` entries. No branch depends on a code: every slot is written to both lists
    /// and kept by the one that its symbol names.
    #[inline(always)]
    fn fill_words<const SLOTS: usize, const BITS: usize>(
        &mut self,
        entries: impl Iterator<Item = u32>,
        words: usize,
        end: u32,
    ) {
        self.reserve(SLOTS * words + 1);
        let [negative, positive] = &mut self.places;
        let [mut negatives, mut positives] = self.counts;
        let mut at = 0;
        for entry in entries {
            for slot in 0..SLOTS {
                let position = (at + (entry >> (BITS * slot) & ((1 << BITS) - 1))).min(end);
                let symbol = entry >> (16 + 2 * slot) & 3;
                negative[negatives] = position;
                negatives += usize::from(symbol == 1);
                positive[positives] = position;
                positives += usize::from(symbol == 2);
            }
            at = (at + (entry >> 24)).min(end);
        }
        self.counts = [negatives, positives];
    }

    fn fill_raw(&mut self, bytes: &[u8], end: u32) {
        let entries = bytes.iter().flat_map(|&byte| [byte & 15, byte >> 4]);
        // Two weights as a word of two slots and length 2.
        let word = |weights: u8| u32::from(weights) << 16 | 1 << 8 | 2 << 24;
        self.fill_words::<2, 8>(entries.map(word), 2 * bytes.len(), end);
    }
}
