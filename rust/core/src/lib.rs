//! The moepack core: bit packing, entropy coding and matrix products of compressed weights.
//!
//! The crate does not depend on Python. All decoders treat bytes as untrusted: they check each length, offset and
//! code before using it, and return an [`Error`] instead of panicking.

// Matrix registers and byte panels are used only by x86-64 kernels. Marking each item would hide the code.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

pub mod bits;
pub mod decoder;
pub mod error;
pub mod formats;
pub mod gemm;
pub mod hadamard;
pub mod limits;
pub mod memory;
pub mod pool;
pub mod simd;
pub mod solvers;
pub mod streaming;
pub mod tensor;
pub mod types;
mod waiting;
mod workers;

pub use error::{Error, Result};
