//! Products by entropy-coded integers ([`crate::formats::coded`]), directly from the coded bytes.
//!
//! Several streams at a time are decoded by *pieces* of columns into registers of 16 rows by four columns. These stay
//! in the first-level cache and are multiplied by a broadcast of four activations of each token. Decoding costs far
//! more than the store and the load in between. Sums cross lanes only at the end of a row. Scales and exceptions
//! (codes that differ from their streams) are applied last. Column scales are applied first: prepared activations are
//! multiplied by them in f32.
//!
//! * *exact*: codes become f32; activations are not rounded.
//! * *int8*: activations are rounded to bytes, symmetrically, by the largest of each piece of a token; products are
//!   integer dot products of symbols, which are not negative, and sums of activations correct for it.
//! * *bf16*, also the choice of *auto*: experts with many tokens are multiplied by panels of bf16 ([`panels`]),
//!   others exactly.
//!
//! Low bits (of codes at high rates) are decoded beside the symbols and multiplied separately: a sum is 2^r times
//! that of the symbols' integers plus that of the low bits.
//!
//! # Accuracy
//! With u = 2^-24 and S = sum of |scale * code * x| over the C columns of a row, of which k are exceptions, the error
//! of an exact output is at most (C / 4 + k + 8) u S. The same bound holds for int8, with S over the rounded
//! activations, whose rounding error is at most 1/254 of the largest activation of their piece; if the largest is
//! below 2^-100, the piece counts as zero. int8 gives the same bits on every instruction set. A piece with an
//! activation that is not finite makes its token's outputs NaN. In bf16, codes up to 256 are exact; activations and
//! larger codes have a relative error of at most 2^-8. With r low bits, S has |code| + 2^(r+1) instead of |code|.
//! With column scales, all bounds apply to the products of activations and column scales, which are rounded to f32
//! once more: that adds u S, and the products must not leave the range of f32.

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
use crate::simd::{self, Isa};
use crate::types::Mode;

/// The compute modes of coded tensors.
pub const MODES: [Mode; 4] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8];

/// The name of the kernel for an instruction set.
pub fn kernel_name(isa: Isa) -> &'static str {
    simd::name_with_dot_products(isa)
}

/// The registers of a piece.
const PIECE: usize = 32;

/// The precision of activations in products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// Not rounded.
    Exact,
    /// Rounded to bytes.
    Int8,
}

impl Precision {
    /// The number of sums of a row block and a token: one per lane, or one per row.
    fn sums(self) -> usize {
        match self {
            Precision::Exact => LANES,
            Precision::Int8 => BLOCK_ROWS,
        }
    }
}
