//! Experts by channels, for products that skip most channels (FloE). The gate row and the down column of a channel
//! form one record, which is read only if the channel's up projection output passes the expert's threshold.
//!
//! As a tensor it has E experts, one row per channel and 2 H columns; the first H columns are the gate row. Values
//! are bf16, or symmetric integers of 8 or 4 bits, `scale * code`, with one scale per 64 columns of each half.
//!
//! ```text
//!  0 8s magic "MOEPCHNL"   10 u8 bits 4, 8, 16 (bf16)   16 u64 experts E       32 u64 columns of a half H
//!  8 u16 version 1         11 5 zeros                   24 u64 channels of one  40 88 zeros
//! thresholds  E f32, not negative, infinity included; zeros to the next multiple of 64
//! records     of each expert's channels, in order:
//!   values    of the gate row, then of the down column, each padded to a multiple of 64 columns: bf16; signed bytes; or
//!             for each 64 columns 32 bytes, byte i being 8 + the code of column i and, 4 bits higher, of column 32 + i
//!   scales    unless bf16: ceil(H / 64) bf16 of the gate row, as many of the down column; zeros to a multiple of 64
//! ```
//!
//! Records are contiguous and 64-byte aligned, so that each is a single read from a drive, copy to a GPU or stream
//! for a processor. Parsing checks the header and the size; no value can cause an out-of-bounds read.
//! [`View::verify`] checks the rest.

mod encode;
mod layout;
#[cfg(test)]
pub(crate) mod tests;
mod view;

pub use encode::{Content, encode};
pub use layout::{Layout, Width};
pub use view::{Half, View};

use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPCHNL";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;
/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;
/// The number of columns that share a scale.
pub const GROUP: usize = 64;
/// The alignment of thresholds and records, in bytes.
pub const ALIGNMENT: usize = 64;

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("channels: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("channels: {what}")))
}
