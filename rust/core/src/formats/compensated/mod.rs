//! Group-wise tensors with low-rank compensators: `W = Wq + U V`, with a rank per expert.
//!
//! A tensor embeds a complete group-wise tensor and adds the factors of all experts: the r rows of V, of C values
//! each, and the r columns of U, stored as rows of R values. Rows are stored in chunks of 64 values with one scale.
//! Each unit of rank costs exactly one row of each factor, without padding between experts.
//!
//! ```text
//!  0 8s magic "MOEPCOMP"     10 u8 bits of the factors: 3, 8, 16    16 u64 bytes of the group-wise tensor
//!  8 u16 version 1           11 5 zeros                             24 u64 sum of the ranks T, 32 96 zeros
//! base         a group-wise tensor of E x R x C
//! ranks        E u32, each at most min(R, C)
//! right        T rows of V: scales (f16, one per chunk; none at 16 bits), then chunks, all rows' scales first
//! left         T rows of U^T, likewise
//! ```
//!
//! `ranks`, and the scales and the chunks of `right` and `left`, are five sections, each aligned to 64 bytes; the
//! tensor ends at a multiple of 64. Chunks are described in [`chunk`].
//!
//! [`View::parse`] checks headers, ranks and the size, a few bytes per expert: no scale or code can cause an
//! out-of-bounds read. [`View::verify`] checks scales and padding, and the embedded tensor.

pub mod chunk;
mod encode;
mod layout;
mod view;

pub use encode::{Factor, encode};
pub use layout::Layout;
pub use view::{FactorRow, View};

use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPCOMP";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;
/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;

const ALIGNMENT: usize = 64;

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("compensated tensor: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("compensated tensor: {what}")))
}

#[cfg(test)]
pub(crate) mod tests;
