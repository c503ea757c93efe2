//! Panels of bf16 ([`crate::gemm::panel`]) of ternary weights, for many tokens.
//!
//! Rows are entropy coded, so a block of 16 rows is decoded as a whole when it is opened, once per strip, to lists of
//! its non-zero weights ([`List`]). Chunks are filled with zeros and then with the next items of each row's list: the
//! work is proportional to the codes. Levels are rounded to bf16, the type in which most tensors store them.
//!
//! For arbitrary codes, items are only written to existing lines, and the first item after the columns ends a row.

use std::ops::Range;

use super::lists::List;
use crate::formats::ternary::layout::GROUP_ROWS;
use crate::formats::ternary::{Row, TernaryView};
use crate::gemm::panel::{
    Backend, Element, LANES, Line, Section, Source, Square, Tile, TokenForm, bf16, round_token,
};
use crate::simd::Isa;
use crate::types::{Activations, Shape};

/// The columns of a chunk.
const CHUNK: usize = 2 * LANES;

/// The minimum number of tokens of an expert for which panels are faster with AMX, measured on two busy cores of a
/// Xeon: 64 tokens by 14336 x 4096 take 32 ms with lists and 35 with panels, 256 take 104 and 61.
pub(super) const FEWEST: usize = 96;

/// The backend whose panels are faster than lists, which skip zeros: AMX only. Vectors are slower for any number of
/// tokens: on two busy cores of a Zen 3, 16, 64 and 256 tokens by 14336 x 4096 take 41, 132 and 303 ms with lists,
/// and 149, 369 and 902 with panels.
pub(super) fn backend(isa: Isa) -> Option<Backend> {
    Backend::of_matrix(isa)
}

/// A tensor decoded into panels, and the vector instructions that round its tokens.
#[derive(Clone)]
pub(super) struct Rounded<'a> {
    view: TernaryView<'a>,
    isa: Isa,
}

impl<'a> Rounded<'a> {
    /// Panels for a backend.
    pub fn new(view: TernaryView<'a>, backend: Backend) -> Self {
        let isa = backend.vectors();
        Rounded { view, isa }
    }
}

/// The decoded rows of an open block.
#[derive(Default)]
pub(super) struct Rows([Listed; LANES]);

/// The list of a row, and the part already written to panels.
#[derive(Default)]
struct Listed {
    list: List,
    /// The index of the next item.
    next: usize,
    /// The word of an item by its lowest two bits: the lowest bit selects the level, the other one the half of the
    /// word.
    words: [u32; 4],
}

impl Listed {
    fn open(&mut self, view: &TernaryView, row: Row, levels: (f32, f32)) {
        self.list.fill(view, row);
        self.next = 0;
        let [one, two] = self.list.levels(levels).map(bf16);
        self.words = [one, two, one << 16, two << 16];
    }

    /// Writes items of columns below `end` to word `word` of lines, the first of which is line `first` of the block.
    fn write(&mut self, word: usize, first: usize, end: usize, lines: &mut [Line]) {
        let items = self.list.items();
        let mut next = self.next;
        // An item is twice its column, plus the number of its level.
        while let Some(&item) = items.get(next).filter(|&&item| item < 2 * end as u32) {
            if let Some(line) = lines.get_mut((item as usize / 4).wrapping_sub(first)) {
                line.0[word] |= self.words[item as usize % 4];
            }
            next += 1;
        }
        self.next = next;
    }
}

impl Source for Rounded<'_> {
    type Open = Rows;

    fn shape(&self) -> Shape {
        self.view.shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.view.columns(),
            section: self.view.columns().div_ceil(CHUNK).max(1),
            variant: 1,
            factors: 0,
        }
    }

    fn token(&self, x: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        round_token(self.isa, x, (token, self.view.columns()), |_| (), lane, tile);
    }

    fn open(&self, block: usize, open: &mut Rows) {
        let view = &self.view;
        let blocks = view.rows().div_ceil(LANES);
        let (expert, first) = (block / blocks, block % blocks * LANES);
        let mut rows = view
            .group_rows(expert, first / GROUP_ROWS)
            .skip(first % GROUP_ROWS);
        for row in &mut open.0 {
            match rows.next() {
                Some(placed) => {
                    let levels = view.levels(expert * view.rows() + placed.row);
                    row.open(view, placed.codes, levels);
                }
                None => row.open(view, Row::Zero, (0.0, 0.0)),
            }
        }
    }

    fn decode(&self, _: usize, open: &mut Rows, chunks: Range<usize>, to: &mut [Line]) {
        to.fill(Line::ZERO);
        let end = (chunks.end * CHUNK).min(self.view.columns());
        for (word, row) in open.0.iter_mut().enumerate() {
            row.write(word, chunks.start * LANES, end, to);
        }
    }

    fn finish(&self, _: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        *out = sums.floats();
    }
}

#[cfg(test)]
mod tests;
