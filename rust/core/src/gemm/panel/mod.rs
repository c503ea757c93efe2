//! Products with many tokens by panels: packed weights are decoded piece by piece into a cache, in the form that products
//! of bf16 or bytes take, and multiplied by all tokens of their expert from there.
//!
//! Decoding costs the same for any number of tokens, and these products are the fastest that a processor has. Any packed
//! format takes part by [`Source`]: it decodes a *block* of 16 rows over some columns, brings tokens into lines, and
//! turns sums into outputs; [`products`] makes of it what [`crate::gemm::layer`] multiplies.
//!
//! # The form
//! A [`Line`] is 64 bytes. Of weights it holds one 32-bit word of each of 16 rows: two columns in bf16, or four in bytes.
//! Of a token it holds 16 such words, one after the other. Sixteen lines are a *chunk*, of 32 or 64 columns: what a
//! matrix register (AMX) holds of 16 rows, or of a *tile* of 16 tokens.
//!
//! # How a product is cut
//! A *strip* of rows goes by *steps*, two blocks over a piece of columns, whose panel stays in the cache while all tokens
//! are multiplied, a tile at a time; the next step's panel is decoded meanwhile. Products add up over a *section* of
//! columns, which the source turns into outputs while the next section is multiplied. Strips of tokens that the
//! second-level cache does not hold are so high that reading tokens again for each strip costs little. The order of a sum
//! depends on nothing but the columns: neither on the number of threads nor on which tokens share the panel.
//!
//! # Accuracy of bf16
//! A factor that is rounded to bf16 is off by at most 2^-8 of itself. Products add up in f32: with u = 2^-24, n columns
//! in a section and S the sum of |w x| over the rounded factors, a section's sum is off by at most n u S. Instruction
//! sets differ in how they round it, and those with products of bf16 take numbers below 2^-126 for zero. NaN and infinity
//! stay with their token.

mod backend;
mod products;
mod rounding;
mod strip;
#[cfg(test)]
pub(crate) mod tests;
mod tokens;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

pub(crate) use backend::{Backend, bf16, pair};
pub(crate) use products::products;
pub(crate) use rounding::round_token;
pub(crate) use tokens::Tile;

use crate::types::Activations;
use crate::types::Shape;

/// Rows of a block, tokens of a tile, words of a line, and lines of a chunk.
pub(crate) const LANES: usize = 16;

/// 64 bytes, aligned as such: 16 words, the first byte of each the least significant one.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u32; LANES]);

impl Line {
    /// All zeros, in both kinds of elements.
    pub const ZERO: Line = Line([0; LANES]);
}

/// The words of 16 tokens by 16 rows: sums (the bits of f32, or i32) or outputs.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Square<T>(pub [[T; LANES]; LANES]);

impl Square<u32> {
    /// The values of sums that are the bits of f32.
    pub fn floats(&self) -> Square<f32> {
        Square(self.0.map(|row| row.map(f32::from_bits)))
    }
}

/// What weights and tokens hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    /// bf16, two in a word; sums are the bits of f32.
    Bf16,
    /// Signed bytes of weights and unsigned bytes of tokens, four in a word; sums are i32.
    Byte,
}

impl Element {
    /// Columns of a chunk.
    pub fn columns(self) -> usize {
        match self {
            Element::Bf16 => 2 * LANES,
            Element::Byte => 4 * LANES,
        }
    }
}

/// What makes tokens' lines the same for two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenForm {
    pub element: Element,
    pub columns: usize,
    /// Chunks of a section, at least 1.
    pub section: usize,
    /// Which rounding, in the source's own numbering.
    pub variant: usize,
}

/// A section of columns of a block.
pub(crate) struct Section {
    /// Among the blocks of all experts.
    pub block: usize,
    /// Of the row.
    pub section: usize,
}

/// Packed weights of several experts.
pub(crate) trait Source: Send + Sync {
    /// What a thread keeps of a block from [`Source::open`] to its last [`Source::decode`].
    type Open: Default;

    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// What its tokens' lines hold.
    fn form(&self) -> TokenForm;

    /// Writes token `token` of `x` into lane `lane` of a tile.
    fn token(&self, x: &Activations, token: usize, lane: usize, tile: &mut Tile);

    /// Makes block `block` of all experts' blocks readable, before any of its chunks are decoded: what each call of
    /// [`Source::decode`] would prepare anew, or all of the block where it cannot be decoded from anywhere.
    fn open(&self, block: usize, open: &mut Self::Open);

    /// Blocks that are best opened together: a strip has whole numbers of them, but at the end of an expert's rows.
    fn together(&self) -> usize {
        1
    }

    /// Opens the blocks of a strip, as [`Source::open`] does one.
    fn open_strip(&self, blocks: Range<usize>, open: &mut [Self::Open]) {
        let pairs = blocks.zip(open);
        pairs.for_each(|(block, open)| self.open(block, open));
    }

    /// Decodes chunks of an open block into 16 lines each. Calls go through a block's chunks in ascending order, each
    /// chunk once. Columns behind the last are zeros, or any finite number, for activations are zero there.
    fn decode(&self, block: usize, open: &mut Self::Open, chunks: Range<usize>, to: &mut [Line]);

    /// Adds what the sums of a section are worth to the outputs, which start at zero.
    fn finish(&self, section: &Section, tile: &Tile, sums: &Square<u32>, out: &mut Square<f32>);
}
