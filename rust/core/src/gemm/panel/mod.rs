//! Products with many tokens by panels: packed weights are decoded into the cache as bf16 or bytes, a few columns of
//! a few rows at a time, and multiplied there by all tokens of their expert.
//!
//! Decoding costs the same for any number of tokens, and these products use a processor's fastest instructions. A
//! packed format implements [`Source`]: it decodes a *block* of 16 rows over some columns, writes tokens into lines,
//! and turns sums into outputs; [`products`] gives the products of a job to [`crate::gemm::layer`].
//!
//! # Layout
//! A [`Line`] is 64 bytes. A line of weights holds one 32-bit word of each of 16 rows: two columns in bf16, or four
//! in bytes. A line of a token holds 16 consecutive words. Sixteen lines are a *chunk*, of 32 or 64 columns: an AMX
//! register of 16 rows, or of a *tile* of 16 tokens.
//!
//! # How a product is divided
//! A thread multiplies a *strip* of rows in *steps*: two blocks over some columns, whose panel stays in the cache
//! while all tokens are multiplied, a tile at a time; the next step's panel is decoded meanwhile. Products are summed
//! over a *section* of columns, which the source turns into outputs while the next section is multiplied. If tokens
//! do not fit the second-level cache, strips have many rows, so that reading the tokens again for each strip costs
//! little. The order of a sum depends only on the columns, not on the number of threads or on which tokens share the
//! panel.
//!
//! # Accuracy of bf16
//! Rounding a factor to bf16 has a relative error of at most 2^-8. Products add up in f32: with u = 2^-24, n columns
//! in a section and S the sum of |w x| over the rounded factors, the error of a section's sum is at most n u S.
//! Instruction sets round it differently, and those with bf16 products treat numbers below 2^-126 as zero. NaN and
//! infinity affect only the outputs of their token.

mod backend;
#[cfg(target_arch = "aarch64")]
mod neon;
mod products;
mod rounding;
mod strip;
#[cfg(test)]
pub(crate) mod tests;
mod tokens;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

pub(crate) use backend::{Backend, Instructions, bf16, pair};
pub(crate) use products::products;
pub(crate) use rounding::round_token;
pub(crate) use tokens::Tile;

use crate::types::{Activations, Shape};

/// The rows of a block, tokens of a tile, words of a line, and lines of a chunk.
pub(crate) const LANES: usize = 16;

/// 64 bytes, aligned to 64: 16 little-endian words.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u32; LANES]);

impl Line {
    /// A line of zeros, for either element type.
    pub const ZERO: Line = Line([0; LANES]);
}

/// Sums (the bits of f32, or i32) or outputs of 16 tokens by 16 rows.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Square<T>(pub [[T; LANES]; LANES]);

impl Square<u32> {
    /// The sums as f32, from their bits.
    pub fn floats(&self) -> Square<f32> {
        Square(self.0.map(|row| row.map(f32::from_bits)))
    }
}

/// The type of the numbers in lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    /// bf16, two in a word; sums are the bits of f32.
    Bf16,
    /// Signed bytes of weights and unsigned bytes of tokens, four in a word; sums are i32.
    Byte,
}

impl Element {
    /// The columns of a chunk.
    pub fn columns(self) -> usize {
        match self {
            Element::Bf16 => 2 * LANES,
            Element::Byte => 4 * LANES,
        }
    }
}

/// The form of token lines: tensors with equal forms share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenForm {
    pub element: Element,
    pub columns: usize,
    /// The number of chunks of a section, at least 1.
    pub section: usize,
    /// The rounding of activations, as a number that is unique for each source and rounding.
    pub variant: usize,
    /// The identity of the factors that activations are multiplied by first; 0 if there are none.
    pub factors: usize,
}

/// A section of columns of a block.
pub(crate) struct Section {
    /// The index of the block, counted over all experts.
    pub block: usize,
    /// The index of the section in the row.
    pub section: usize,
}

/// Packed weights of several experts.
pub(crate) trait Source: Send + Sync {
    /// The state of a block that a thread keeps from [`Source::open`] to the last [`Source::decode`].
    type Open: Default;

    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// The form of its token lines.
    fn form(&self) -> TokenForm;

    /// Writes token `token` of `x` into lane `lane` of a tile of an expert.
    fn token(&self, x: &Activations, expert: usize, token: usize, lane: usize, tile: &mut Tile);

    /// Prepares block `block`, counted over all experts, before its chunks are decoded: computes what every call of
    /// [`Source::decode`] needs, or decodes the whole block if it cannot be decoded from any column.
    fn open(&self, block: usize, open: &mut Self::Open);

    /// The number of blocks to open together: a strip has a multiple of it, except at the end of an expert's rows.
    fn together(&self) -> usize {
        1
    }

    /// Opens the blocks of a strip, each like [`Source::open`].
    fn open_strip(&self, blocks: Range<usize>, open: &mut [Self::Open]) {
        let pairs = blocks.zip(open);
        pairs.for_each(|(block, open)| self.open(block, open));
    }

    /// Decodes chunks of an open block into 16 lines each. A block's chunks are decoded in ascending order, each
    /// once. Columns after the last may hold any finite numbers, because activations are zero there.
    fn decode(&self, block: usize, open: &mut Self::Open, chunks: Range<usize>, to: &mut [Line]);

    /// Adds the outputs for the sums of a section to `out`, which starts at zero.
    fn finish(&self, section: &Section, tile: &Tile, sums: &Square<u32>, out: &mut Square<f32>);
}
