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

pub use chain::{Affine, Chain};

use super::register::Register;
use crate::simd::Isa;

/// Decodes the next `registers` registers of several streams of a tensor: first those of the first stream, then those
/// of the second, and so on. The processor must support `isa`.
#[inline]
pub fn decode(isa: Isa, chains: &mut [Chain], registers: usize, out: &mut [Register]) {
    // The decoders rely on this bound.
    assert!(out.len() >= chains.len() * registers);
    match isa {
        // SAFETY: the processor supports the instruction set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::decode(chains, registers, out) },
        // SAFETY: as above; these sets include the AVX-512 features used.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512::decode(chains, registers, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::decode(chains, registers, out) },
        _ => scalar::decode(chains, registers, out),
    }
}

/// The number of streams to interleave for best throughput.
pub fn side_by_side(isa: Isa) -> usize {
    match isa {
        Isa::Scalar => 1,
        Isa::Neon | Isa::Avx2 => 4,
        Isa::Avx512 | Isa::Amx => 8,
    }
}
