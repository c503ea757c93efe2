//! Codebook tensors: codes of 2, 3 or 4 bits with a codebook per row or per column block of a row.
//!
//! A weight is `scale * centroid[code]`. Centroids are 16-bit integers with separately stored high and low bytes:
//! `centroid = 256 * high + low`, both signed. One format thus serves three kinds of products: `high` alone is the
//! centroid rounded to 8 bits, integer products of both bytes are exact, and floating point has 16 bits relative to
//! the row's largest centroid. Tensors whose products round activations need only 8 bits: their low bytes are zero
//! and are not stored.
//!
//! The layout is designed for byte shuffles. With 3 or 4 bits a 64-byte register holds 4 rows of 16 columns: each of
//! its four 16-byte lanes belongs to one row, so the row's codebook is the lane's shuffle table, and one instruction
//! maps codes to centroids. With 2 bits a register holds 16 rows of 16 columns, whose codebooks take 64 bytes
//! together: the table of one permutation. 16 rows form a row block, which holds, for each column block, parameters
//! and then codes:
//!
//! ```text
//!  0 8s magic "MOEPCODE"      11 u8 activation bits: 0 none, 4, 8     24 u64 rows R       48 80 zeros
//!  8 u16 version 1            12 u8 ndim 2 or 3, 14 2 zeros           32 u64 columns C
//! 10 u8 bits 2, 3 or 4        13 u8 log2 of Hadamard's width          40 u64 block size in columns
//!                             16 u64 experts E
//! then for each expert, for each row block, for each column block, with K = 2^bits:
//! 16*K i8   high bytes of the rows' centroids          16 i32  for each row the sum of high over the block's columns
//! 16*K i8   low bytes (if 11 is 0)                     16 i32  the same sum of whole centroids (if 11 is 0)
//! 16 f32    scales                                     for each step of columns the codes of its rows
//! a step    32 (4 bits), 128 (3) or 64 (2) columns in 256, 768 or 256 bytes, see `bits`
//! ```
//!
//! Sizes of parameters and steps are multiples of 64. The sums correct for the zero-point of unsigned activations.
//! Rows are padded to 16 with zeros throughout, columns to a whole step with codes 0.
//!
//! [`View::parse`] checks only the header and the size: no byte after the header can cause an out-of-bounds read.
//! [`View::verify`] checks all bytes.

pub mod bits;
mod encode;
mod layout;
mod view;

pub use encode::{Content, encode};
pub use layout::{Layout, MAX_COLUMNS};
pub use view::{Block, View};

use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPCODE";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;
/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;
/// The rows of a row block; `docs/format.md` calls it a panel.
pub const PANEL: usize = 16;
/// Block sizes are multiples of this number of columns, which is a whole number of steps for any number of bits.
pub const BLOCK_UNIT: usize = 128;
/// The largest magnitude of a centroid; its high byte, the centroid rounded to 8 bits, is then at most 127.
pub const MAX_CENTROID: i16 = 127 * 256 + 127;

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("codebook tensor: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("codebook tensor: {what}")))
}

/// Splits a centroid into its high and low byte: `256 * high + low`, low from -128 to 127.
#[inline(always)]
pub fn split(centroid: i16) -> (i8, i8) {
    let low = centroid as i8;
    let high = (i32::from(centroid) - i32::from(low)) >> 8;
    (high as i8, low)
}

/// Joins the high and the low byte of a centroid, the inverse of [`split`].
#[inline(always)]
pub fn join(high: i8, low: i8) -> i32 {
    256 * i32::from(high) + i32::from(low)
}

#[cfg(test)]
pub(crate) mod tests;
