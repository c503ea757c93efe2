//! The packed formats, one room each: how a tensor lies in bytes, how it is packed, opened and checked.

pub mod channels;
pub mod codebook;
pub mod coded;
pub mod compensated;
pub mod groupwise;
mod header;
pub(crate) mod rows;
pub mod ternary;
