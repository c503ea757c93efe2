//! Codebook kernels for x86-64.
//!
//! Integer modes: [`super::kernel`] over registers of four or two rows, and [`super::planes`] for 2 bits. Exact mode:
//! [`exact`] with AVX-512; with AVX2 the portable kernel with lookups by permutations.
//!
//! Loops deliberately index arrays: a closure called by an iterator or `array::map` is compiled outside the function
//! that enables the instructions, and each intrinsic in it becomes a call (measured: ten times slower).

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::pieces::{self, Pieces};
use super::planes::shuffles;
use super::portable::{self, Lookup};
use super::tokens::Prepared;
use super::{Precision, Rows, kernel};
use crate::formats::codebook::Block;
use crate::formats::codebook::bits::LANE;

mod avx2;
mod avx512;
mod exact;
mod load;
mod quantize;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;
pub(super) use quantize::quantize;

/// A [`Lookup`] with AVX2 permutations.
struct Permutations;

impl Lookup for Permutations {
    #[inline(always)]
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]) {
        for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
            // SAFETY: only `avx2` names this type, and its caller has AVX2; the halves of the table, the codes and
            // the output have 8 elements each.
            unsafe {
                let low = _mm256_loadu_ps(table.as_ptr());
                let high = _mm256_loadu_ps(table.as_ptr().add(8));
                let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                let values = _mm256_blendv_ps(
                    _mm256_permutevar8x32_ps(low, codes),
                    _mm256_permutevar8x32_ps(high, codes),
                    upper,
                );
                _mm256_storeu_ps(out.as_mut_ptr(), values);
            }
        }
    }
}

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
///
/// # Safety
/// The processor has AVX2 and FMA.
pub(super) unsafe fn avx2(
    block: &Block,
    precision: Precision,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut portable::Buffers,
    out: &mut Rows,
) {
    #[target_feature(enable = "avx2,fma")]
    fn exact(
        block: &Block,
        first: usize,
        prepared: &Prepared,
        tokens: &[usize],
        buffers: &mut portable::Buffers,
        out: &mut Rows,
    ) {
        portable::exact::<Permutations>(block, first, prepared, tokens, buffers, out);
    }
    #[target_feature(enable = "avx2,fma")]
    fn integer(
        block: &Block,
        centroid_bytes: usize,
        first: usize,
        prepared: &Prepared,
        tokens: &[usize],
        pieces: &mut Pieces,
        out: &mut Rows,
    ) {
        // SAFETY: the function has the features of the lanes.
        unsafe { kernel::compute::<Avx2>(block, centroid_bytes, first, prepared, tokens, pieces, out) }
    }
    let pieces = &mut buffers.pieces;
    // SAFETY: the caller guarantees AVX2 and FMA.
    unsafe {
        match precision {
            Precision::Exact => exact(block, first, prepared, tokens, buffers, out),
            Precision::Int16 { .. } => integer(block, 2, first, prepared, tokens, pieces, out),
            Precision::Int8 { .. } => integer(block, 1, first, prepared, tokens, pieces, out),
        }
    }
}

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
///
/// # Safety
/// The processor has the AVX-512 of [`crate::simd::Kind::Avx512`].
pub(super) unsafe fn avx512(
    block: &Block,
    precision: Precision,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut portable::Buffers,
    out: &mut Rows,
) {
    let many = tokens.len() >= pieces::FEWEST;
    let (words, pieces) = (&mut buffers.words, &mut buffers.pieces);
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn integer(
        block: &Block,
        centroid_bytes: usize,
        first: usize,
        prepared: &Prepared,
        tokens: &[usize],
        pieces: &mut Pieces,
        out: &mut Rows,
    ) {
        // SAFETY: the function has the features of the lanes.
        unsafe { kernel::compute::<Avx512>(block, centroid_bytes, first, prepared, tokens, pieces, out) }
    }
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    fn lines<const BYTES: usize>(block: &Block, first: usize, pieces: &mut Pieces, out: &mut Rows) {
        // SAFETY: the function has the features of the lanes; it is only called for 2-bit blocks.
        unsafe { pieces::multiply::<Avx512, 2, BYTES>(block, first, pieces, out) }
    }
    // SAFETY: the caller guarantees AVX-512 with all features that these enable; the bits are the block's.
    unsafe {
        match (precision, block.bits()) {
            (Precision::Exact, 2) => exact::exact::<2>(block, first, prepared, tokens, words, out),
            (Precision::Exact, 3) => exact::exact::<3>(block, first, prepared, tokens, words, out),
            (Precision::Exact, _) => exact::exact::<4>(block, first, prepared, tokens, words, out),
            (Precision::Int16 { .. }, 2) if many => lines::<2>(block, first, pieces, out),
            (Precision::Int8 { .. }, 2) if many => lines::<1>(block, first, pieces, out),
            (Precision::Int16 { .. }, 2) => shuffles::multiply::<2>(block, first, prepared, tokens, out),
            (Precision::Int8 { .. }, 2) => shuffles::multiply::<1>(block, first, prepared, tokens, out),
            (Precision::Int16 { .. }, _) => integer(block, 2, first, prepared, tokens, pieces, out),
            (Precision::Int8 { .. }, _) => integer(block, 1, first, prepared, tokens, pieces, out),
        }
    }
}
