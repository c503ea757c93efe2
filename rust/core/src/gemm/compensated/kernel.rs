//! Dispatches the two inner loops by instruction set. [`super::x86`] computes the same sums as [`super::scalar`] in
//! the same order without fused operations, so all sets give the same bits.

use super::scalar::{Coefficients, expand_rows, project_rows};
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::compensated::FactorRow;
use crate::simd::Isa;

/// Computes z = row . x for each token; the processor must support `isa`.
pub fn project(isa: Isa, row: &FactorRow, x: &[f32], z: &mut [f32]) {
    match isa {
        // SAFETY: `isa.require()` in the parent module checked that the processor supports the set, and every
        // processor with AVX-512 F has AVX2.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { x86::project(row, x, z) },
        _ => project_rows(row, x, z),
    }
}

/// Computes y += U z for a run of tokens, at most [`super::TOKENS`]; the processor must support `isa`.
pub fn expand<'a>(
    isa: Isa,
    left: &impl Fn(usize) -> FactorRow<'a>,
    coefficients: Coefficients,
    tokens: usize,
    first_chunk: usize,
    y: &mut [f32],
) {
    match isa {
        // SAFETY: as in `project`.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { x86::expand(left, coefficients, tokens, first_chunk, y) },
        _ => expand_rows(left, coefficients, tokens, first_chunk, y),
    }
}
