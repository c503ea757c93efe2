//! Decodes registers of symbols, with the same result on every instruction set.
//!
//! A single stream is bound by the latency of its state, so decoders interleave several streams.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod chain;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

pub use chain::Chain;

use super::register::Register;
use crate::simd::{Isa, Kind};

/// Decodes the next `registers` registers of several streams of a tensor: first those of the first stream, then those
/// of the second, and so on.
#[inline]
pub fn decode(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // The decoders rely on this bound.
    assert!(out.len() >= chains.len() * registers);
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { avx2::decode(chains, registers, out) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { avx512::decode(chains, registers, out) },
        // SAFETY: `isa` proves that the processor has NEON.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { neon::decode(chains, registers, out) },
        _ => scalar::decode(chains, registers, out),
    }
}

/// The number of streams to interleave for best throughput.
pub fn side_by_side(isa: Isa) -> usize {
    match isa.kind() {
        Kind::Scalar => 1,
        Kind::Neon | Kind::Avx2 => 4,
        Kind::Avx512 | Kind::Amx => 8,
    }
}

/// The least number of streams to interleave for nearly the best throughput. On a Xeon with AVX-512, two streams reach
/// 0.7 of it, and three or four 0.9.
pub fn well_side_by_side(isa: Isa) -> usize {
    side_by_side(isa).min(5)
}
