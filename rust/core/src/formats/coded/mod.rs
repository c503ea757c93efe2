//! Entropy-coded integers at any rate; the step is per row or per tensor.
//!
//! A weight is `scale * code`, or `(scale * code) * column` if columns have scales ([`scales`]). Integers with a single
//! step per tensor, chosen by rate-distortion optimization and entropy-coded, have a smaller error than fixed-width
//! integers of the same size. Decoding runs at about memory bandwidth. The entropy coder is interleaved rANS with
//! byte-wise renormalization: 64 *lanes*, each with a 16-bit state x = 256 high + low. A *table* distributes 256 slots
//! among at most 64 symbols, which are consecutive integers from `lowest` on: symbol s has the slots from `start[s]` to
//! `start[s] + frequency[s] - 1`. A lane decodes a symbol by
//!
//! ```text
//! s = symbol of the slot `low`         x = frequency[s] * high + (low - start[s])
//! if x < 256: x = 256 x + next byte of the stream (lanes in ascending order)
//! ```
//!
//! Lane 4 (row mod 16) + column mod 4 decodes a weight of a *row block* (16 rows), so that a *register* of 64 symbols
//! is 16 rows by a *quad* of columns: an operand of `vpdpbusd` with one broadcast word of activations as the other
//! operand. A *stream* consists of the states of all lanes and the bytes that follow; it codes one row block, or four
//! consecutive ones if rows are narrow. Streams start at known offsets and are decoded independently.
//!
//! At high rates codes spread over more integers than a table lists, and their low bits are nearly random. A tensor
//! may therefore store r *low bits* of each code uncompressed: a code is 2^r times a symbol's integer plus its low
//! bits. Bit p of a register's codes is a *bit plane* of 8 bytes.
//!
//! A code that a table does not list is an *exception*: the stream decodes to another integer, and the difference is
//! stored separately. Codes may be *dependent* ([`trellis`]): then symbols are trellis indices, and the differences of
//! exceptions are in units of four. [`Symbols`] selects plain or dependent codes.
//!
//! ```text
//!  0 8s magic "MOEPRANS"       14 u8 tables T, at most 64        40 u64 bytes of the payload
//!  8 u16 version 1             15 u8 symbols K of a table, 2-64  48 u64 exceptions
//! 10 u8 ndim 2 or 3            16 u64 experts E                  56 u8 bytes of an index entry, 4 or 8
//! 11 u8 row blocks of a        24 u64 rows R                     57 u8 bytes of an exception, 4 or 8
//!       stream, 1 or 4         32 u64 columns C                  58 u8 low bits r, 0 to 3; 0 for dependent codes
//!                                                                59 u8 symbols: 0 plain, 1 dependent
//! 12 u8 row scales, 0 or 1                                       60 u8 column scales: 0 none, 1 C, 2 E x C
//! 13 u8 type of scales: 0 bf16, 1 f32                            61 3 zeros
//! tables     T times: the lowest integer, i8, and K frequencies, u8, which add up to 256
//! scales     one, or E x R
//! columns    none, or C, or E x C
//! index      per stream, from the low bits: number of renormalization bytes (16 bits, or 32), number of the table (8),
//!            number of exceptions (8, or 24)
//! exceptions from the low bits: signed difference of the code to its symbol's integer (8 bits, or 32), position in the
//!            stream (24, or 32)
//! payload    per stream: 64 high bytes, 64 low bytes, renormalization bytes, the r bit planes of each register
//! ```
//!
//! Sections start at multiples of 64; the tensor ends at a multiple of 64 with at least 64 zeros after the payload,
//! so that a decoder may read whole vectors.
//!
//! Invariants of [`Coded`]: the frequencies of each table add up to 256, so any byte is the slot of a symbol; streams
//! lie in the payload, and each has a table; a tensor has at most 1,424 symbols per byte (the most that rANS can code),
//! so that a small file cannot declare a huge tensor. Decoders clamp their position in a stream after every register.
//! For arbitrary bytes they therefore read at most 64 bytes past its end, and all instruction sets give the same
//! result. [`CodedView::verify`] decodes everything: decoding must consume exactly the bytes of each stream and leave
//! all states at 256.

mod affine;
mod code;
mod coder;
mod column_scales;
mod compact;
mod decode;
pub mod device;
mod encode;
mod fit;
mod histogram;
mod layout;
mod planes;
mod register;
mod rows;
mod scales;
mod stream;
mod symbols;
mod table;
#[cfg(test)]
pub(crate) mod tests;
pub mod trellis;
mod verify;
mod view;

pub use affine::Affine;
pub use code::Code;
pub use column_scales::ColumnScales;
pub use decode::{Chain, decode, side_by_side, well_side_by_side};
pub use encode::encode;
pub use layout::Layout;
pub use planes::lows;
pub use register::Register;
pub use scales::{Columns, Scales};
pub use symbols::Symbols;
pub use table::Table;
pub use view::{Coded, CodedView, Exception};

use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPRANS";
/// The version.
pub const VERSION: u16 = 1;
/// The maximum number of low bits of a code.
pub const MAX_LOW_BITS: usize = 3;
/// The rows of a row block.
pub const BLOCK_ROWS: usize = 16;
/// The columns of a register.
pub const QUAD: usize = 4;
/// The lanes of a stream, the symbols of a register, and the readable bytes after the payload.
pub const LANES: usize = BLOCK_ROWS * QUAD;
/// The maximum number of columns: positions in a stream have 24 bits, and sums of byte products over a row have 32.
pub const MAX_COLUMNS: usize = 1 << 18;

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("coded tensor: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("coded tensor: {what}")))
}
