//! Codebook kernels for 64-bit Arm: NEON, with or without dot products of bytes (Armv8.2).
//!
//! Integer modes: [`super::kernel`] over registers of one row for 3 and 4 bits, and [`lines`] for 2 bits. Exact mode:
//! the portable kernel with lookups of four bytes each in a table of 64. Activations of 8 bits come as signed bytes
//! ([`super::tokens`]).

// Closures called by iterators would be compiled without the vector instructions.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::lanes::{AT_ONCE, Lanes};
use super::pieces::Pieces;
use super::portable::{self, Lookup};
use super::tokens::Prepared;
use super::{Precision, Rows, kernel};
use crate::formats::codebook::Block;
use crate::formats::codebook::bits::LANE;
use crate::gemm::neon;
use crate::simd;

mod lines;

/// The instructions of NEON, on registers of one row.
pub(super) struct Neon<const DOT_PRODUCTS: bool>;

impl<const DOT_PRODUCTS: bool> Lanes for Neon<DOT_PRODUCTS> {
    const HALVES: usize = 4;
    const WIDEST: usize = 4;
    const BESIDE: usize = 4;
    const MOST: usize = 6;
    type Int = uint8x16_t;
    type X = int8x16_t;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn zero() -> uint8x16_t {
        vdupq_n_u8(0)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load(from: *const u8) -> uint8x16_t {
        // SAFETY: the caller guarantees 16 readable bytes at `from`.
        unsafe { vld1q_u8(from) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn tables<const BITS: u8>(centroids: *const u8) -> uint8x16_t {
        // SAFETY: the caller guarantees the bytes of a row, 16 or 8, at `centroids`.
        unsafe {
            match BITS {
                4 => vld1q_u8(centroids),
                _ => vcombine_u8(vld1_u8(centroids), vdup_n_u8(0)),
            }
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn store(bytes: uint8x16_t, to: *mut u8) {
        // SAFETY: the caller guarantees 16 writable bytes at `to`.
        unsafe { vst1q_u8(to, bytes) }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mask(bytes: uint8x16_t, mask: u8) -> uint8x16_t {
        vandq_u8(bytes, vdupq_n_u8(mask))
    }
    /// Shifts bytes: the bits of other bytes that enter with words are masked out anyway.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn shift(bytes: uint8x16_t, count: i32) -> uint8x16_t {
        neon::shift_bytes(bytes, count as u32)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn blend(low: uint8x16_t, high: uint8x16_t, mask: u8) -> uint8x16_t {
        vbslq_u8(vdupq_n_u8(mask), low, high)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn look_up(table: uint8x16_t, index: uint8x16_t) -> uint8x16_t {
        vqtbl1q_u8(table, index)
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn interleave(even: uint8x16_t, odd: uint8x16_t) -> [uint8x16_t; 2] {
        [vzip1q_u8(even, odd), vzip2q_u8(even, odd)]
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn transposed([a, b, c, d]: [uint8x16_t; AT_ONCE]) -> [uint8x16_t; AT_ONCE] {
        let [a, b, c, d] = [
            vreinterpretq_u32_u8(a),
            vreinterpretq_u32_u8(b),
            vreinterpretq_u32_u8(c),
            vreinterpretq_u32_u8(d),
        ];
        let (ab, ab_high) = (vzip1q_u32(a, b), vzip2q_u32(a, b));
        let (cd, cd_high) = (vzip1q_u32(c, d), vzip2q_u32(c, d));
        let (ab, ab_high) = (vreinterpretq_u64_u32(ab), vreinterpretq_u64_u32(ab_high));
        let (cd, cd_high) = (vreinterpretq_u64_u32(cd), vreinterpretq_u64_u32(cd_high));
        [
            vreinterpretq_u8_u64(vzip1q_u64(ab, cd)),
            vreinterpretq_u8_u64(vzip2q_u64(ab, cd)),
            vreinterpretq_u8_u64(vzip1q_u64(ab_high, cd_high)),
            vreinterpretq_u8_u64(vzip2q_u64(ab_high, cd_high)),
        ]
    }
    unsafe fn line(_: *const u8, _: *const u8) -> [uint8x16_t; AT_ONCE] {
        unreachable!("2-bit codes have a kernel of their own")
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn activations(from: *const u8) -> int8x16_t {
        // SAFETY: the caller guarantees 16 readable bytes at `from`.
        unsafe { vld1q_s8(from.cast()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: uint8x16_t, weights: uint8x16_t, x: int8x16_t) -> uint8x16_t {
        // SAFETY: the caller guarantees NEON, with dot products if `DOT_PRODUCTS`.
        unsafe {
            let (sums, weights) = (vreinterpretq_s32_u8(sums), vreinterpretq_s8_u8(weights));
            vreinterpretq_u8_s32(neon::dot::<DOT_PRODUCTS, true>(sums, weights, x))
        }
    }
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn row_sums([a, b, c, d]: [uint8x16_t; AT_ONCE], to: *mut i32) {
        let ab = vpaddq_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b));
        let cd = vpaddq_s32(vreinterpretq_s32_u8(c), vreinterpretq_s32_u8(d));
        // SAFETY: the caller guarantees four writable numbers at `to`.
        unsafe { vst1q_s32(to, vpaddq_s32(ab, cd)) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        neon::prefetch(at);
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        neon::prefetch_near(at);
    }
}

/// A [`Lookup`] of the four bytes of each value in a table of 64 bytes.
struct Tables;

impl Lookup for Tables {
    #[inline(always)]
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]) {
        // Value c has bytes 4 c to 4 c + 3 of the table.
        static COPIES: [u8; LANE] = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3];
        static BYTES: [u8; LANE] = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3];
        // SAFETY: only `block` names this type, and its caller has NEON; the table has 64 bytes, and codes and outputs
        // come in chunks of 16.
        unsafe {
            let (copies, bytes) = (vld1q_u8(COPIES.as_ptr()), vld1q_u8(BYTES.as_ptr()));
            let table = vld1q_u8_x4(table.as_ptr().cast());
            let chunks = codes.as_chunks::<LANE>().0.iter();
            for (codes, out) in chunks.zip(out.as_chunks_mut::<LANE>().0) {
                let first = vshlq_n_u8::<2>(vld1q_u8(codes.as_ptr()));
                for four in 0..LANE / 4 {
                    // Codes 4 * four and the next three, four times each.
                    let from = vaddq_u8(copies, vdupq_n_u8(4 * four as u8));
                    let index = vaddq_u8(vqtbl1q_u8(first, from), bytes);
                    vst1q_u8(out.as_mut_ptr().add(4 * four).cast(), vqtbl4q_u8(table, index));
                }
            }
        }
    }
}

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
///
/// # Safety
/// The processor has NEON.
pub(super) unsafe fn block(
    block: &Block,
    precision: Precision,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    buffers: &mut portable::Buffers,
    out: &mut Rows,
) {
    let pieces = &mut buffers.pieces;
    let bytes = match precision {
        Precision::Exact => {
            return portable::exact::<Tables>(block, first, prepared, tokens, buffers, out);
        }
        Precision::Int16 { .. } => 2,
        Precision::Int8 { .. } => 1,
    };
    // SAFETY: the caller guarantees NEON; dot products are detected.
    unsafe {
        match simd::has_dot_products() {
            true => by_dot_products(block, bytes, first, prepared, tokens, pieces, out),
            false => integer::<false>(block, bytes, first, prepared, tokens, pieces, out),
        }
    }
}

/// # Safety
/// The processor has NEON with dot products.
#[target_feature(enable = "neon,dotprod")]
unsafe fn by_dot_products(
    block: &Block,
    centroid_bytes: usize,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    // SAFETY: the function has the features.
    unsafe { integer::<true>(block, centroid_bytes, first, prepared, tokens, pieces, out) }
}

/// Adds products in an integer mode with 1 or 2 bytes of each centroid.
///
/// # Safety
/// The processor has NEON, with dot products if `DOT_PRODUCTS`.
#[inline(always)]
unsafe fn integer<const DOT_PRODUCTS: bool>(
    block: &Block,
    centroid_bytes: usize,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    // SAFETY: the caller guarantees the features of the lanes; the bits are the block's.
    unsafe {
        match (block.bits(), centroid_bytes) {
            (2, 1) => lines::multiply::<DOT_PRODUCTS, 1>(block, first, prepared, tokens, out),
            (2, _) => lines::multiply::<DOT_PRODUCTS, 2>(block, first, prepared, tokens, out),
            _ => kernel::compute::<Neon<DOT_PRODUCTS>>(
                block,
                centroid_bytes,
                first,
                prepared,
                tokens,
                pieces,
                out,
            ),
        }
    }
}
