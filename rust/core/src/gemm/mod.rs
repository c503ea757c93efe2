//! Matrix products by packed weights: y = W x without unpacking W.

pub mod codebook;
pub mod compensated;
pub mod dense;
pub mod groupwise;
pub mod hadamard;
pub mod layer;
mod panel;
pub mod ternary;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
