//! Dispatches the two inner loops by instruction set. [`super::x86`] computes the same sums as [`super::scalar`] in
//! the same order without fused operations, so all sets give the same bits.

use super::scalar::{Coefficients, expand_rows, project_rows};
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::compensated::FactorRow;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// Computes z = row . x for each token.
pub fn project(isa: Isa, row: &FactorRow, x: &[f32], z: &mut [f32]) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 | Kind::Avx512 => unsafe { x86::project(row, x, z) },
        _ => project_rows(row, x, z),
    }
}

/// Computes y += U z for a run of tokens, at most [`super::TOKENS`].
pub fn expand<'a>(
    isa: Isa,
    left: &impl Fn(usize) -> FactorRow<'a>,
    coefficients: Coefficients,
    tokens: usize,
    first_chunk: usize,
    y: &mut [f32],
) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 | Kind::Avx512 => unsafe { x86::expand(left, coefficients, tokens, first_chunk, y) },
        _ => expand_rows(left, coefficients, tokens, first_chunk, y),
    }
}
