//! Products by entropy-coded integers ([`crate::formats::coded`]), straight from the coded bytes.
//!
//! Streams are decoded a *piece* of columns at a time, several side by side, into registers of 16 rows by four columns that
//! stay in the first-level cache, and multiplied from there by a broadcast of four activations of each token: decoding
//! costs far more than the store and the load between. No sum crosses rows before the end of a row. Scales and exceptions
//! (codes that streams do not hold) enter at the end. Scales of columns enter before everything: activations are multiplied
//! by them in f32, where they are prepared.
//!
//! * *exact*: codes become f32, activations are as they are.
//! * *int8*: activations are rounded to bytes, symmetrically, by the largest of each piece of a token; products are
//!   integer dot products of symbols, which are not negative, and sums of activations correct for it.
//! * *bf16*, which *auto* is, too: experts with many tokens are multiplied by panels of bf16 ([`panels`]), others exactly.
//!
//! Low bits (codes of many bits) are decoded beside the symbols and multiplied by themselves: a sum is 2^r times that of the
//! symbols' integers plus that of the low bits.
//!
//! # Accuracy
//! With u = 2^-24 and S = sum of |scale * code * x| over the C columns of a row, of which k are exceptions, an exact output
//! is off by at most (C / 4 + k + 8) u S. Of int8 the same holds, with S over the rounded activations, which are off by at
//! most 1/254 of the largest of their piece; where that is below 2^-100 a piece counts as zero. It gives the same bits on
//! every instruction set. A piece with an activation that is not finite makes its token's outputs NaN. Codes up to 256 are
//! bf16 as they are; activations and larger codes are off by 2^-8 of themselves. With r low bits
//! S has |code| + 2^(r+1) for |code|. With scales of columns all of this holds of the activations times these, which are
//! rounded to f32 once more: that adds u S, and they must not leave its range.

#[cfg(target_arch = "aarch64")]
mod neon;
mod panels;
mod prepared;
mod products;
mod projection;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::Coded;

use crate::formats::coded::{BLOCK_ROWS, LANES};
use crate::types::Mode;

/// The modes that coded tensors have.
pub const MODES: [Mode; 4] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8];

/// Registers of a piece.
const PIECE: usize = 32;

/// How activations enter products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// As they are.
    Exact,
    /// As bytes.
    Int8,
}

impl Precision {
    /// Sums of a row block and a token: of lanes, or of rows.
    fn sums(self) -> usize {
        match self {
            Precision::Exact => LANES,
            Precision::Int8 => BLOCK_ROWS,
        }
    }
}
