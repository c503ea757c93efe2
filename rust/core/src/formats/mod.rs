//! The packed formats, one module each: the byte layout, packing, checked reading and verification.

pub mod channels;
pub mod codebook;
pub mod coded;
pub mod compensated;
pub mod groupwise;
mod header;
pub(crate) mod rows;
pub mod ternary;
