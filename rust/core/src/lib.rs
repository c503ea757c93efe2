//! The moepack core: bit packing, entropy coding and matrix products of compressed weights.
//!
//! Nothing here knows Python. Every decoder of bytes treats them as untrusted: it checks each length, offset and
//! code before using it and reports an [`Error`] instead of panicking.

// What only the kernels of x86-64 use: matrix registers and panels of bytes. Marking each part would hide the code.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

pub mod bits;
pub mod decoder;
pub mod error;
pub mod formats;
pub mod gemm;
pub mod limits;
pub mod pool;
pub mod simd;
pub mod solvers;
pub mod streaming;
pub mod tensor;
pub mod types;
mod workers;

pub use error::{Error, Result};
