//! The moepack core: bit packing, entropy coding and matrix products of compressed weights.
//!
//! Nothing here knows Python. Every decoder of bytes treats them as untrusted: it checks each length, offset and
//! code before using it and reports an [`Error`] instead of panicking.

pub mod bits;
pub mod clustering;
pub mod codebook;
pub mod coded;
pub mod compensated;
mod crew;
pub mod decoder;
pub mod error;
pub mod fitting;
pub mod gemm;
pub mod groupwise;
pub mod kmeans;
pub mod limits;
pub mod pool;
pub mod simd;
pub mod ternary;

pub use error::{Error, Result};
