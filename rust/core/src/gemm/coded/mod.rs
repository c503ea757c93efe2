//! Products by entropy-coded integers ([`crate::formats::coded`]), directly from the coded bytes.
//!
//! Several streams at a time are decoded by *pieces* of columns into registers of 16 rows by four columns. These stay
//! in the first-level cache and are multiplied by a broadcast of four activations of each token. Decoding costs far
//! more than the store and the load in between. Products are of integers: symbols, which are not negative, by the
//! activations of a piece, which are quantized symmetrically by the largest of them. Sums of activations correct for
//! the offset of symbols.
//!
//! * *int8*: activations have 8 bits, one plane of bytes.
//! * *exact*: activations have 24 bits, three planes of signed bytes, each worth 256 of the next. A product is three
//!   integer products, whose sum has the precision of single-precision arithmetic.
//! * *bf16*, also the choice of *auto*: experts with many tokens are multiplied by panels of bf16 ([`panels`]),
//!   others exactly.
//!
//! Scales and exceptions (codes that differ from their streams) are applied last. Column scales are applied first:
//! activations are multiplied by them in f32 before they are quantized.
//!
//! Low bits (of codes at high rates) are decoded beside the symbols and multiplied separately: a sum is 2^r times
//! that of the symbols' integers plus that of the low bits.
//!
//! # Accuracy
//! Let u = 2^-24, C the number of columns, k the number of exceptions of a row, and S the sum of |scale * code * x|
//! over the quantized activations. The error of an output is at most (C / 128 + k + 8) u S. The error of a quantized
//! activation is at most 2^-23 (exact) or 1/254 (int8) of the largest of its piece, plus 3 u of itself; if the largest
//! is below 2^-100, the piece counts as zero. A piece with an activation that is not finite makes its token's outputs
//! NaN. Both give the same bits on every instruction set.
//!
//! In bf16, codes up to 256 are exact; activations and larger codes have a relative error of at most 2^-8, and sums
//! one of (C / 4 + k + 8) u S. With r low bits, S has |code| + 2^(r+1) instead of |code|. With column scales, all
//! bounds apply to the products of activations and column scales, which are rounded to f32 once more: that adds u S,
//! and the products must not leave the range of f32.

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

use crate::simd::{self, Isa};
use crate::types::Mode;

/// The compute modes of coded tensors.
pub const MODES: [Mode; 4] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8];

/// The name of the kernel for an instruction set.
pub fn kernel_name(isa: Isa) -> &'static str {
    simd::name_with_dot_products(isa)
}

/// The registers of a piece, of 128 columns.
const PIECE: usize = 32;
