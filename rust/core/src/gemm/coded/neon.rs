//! The products of a piece with NEON, which converts or multiplies registers directly.

use std::arch::aarch64::*;

use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD, Register};
use crate::gemm::neon;
use crate::simd;

/// The vectors of a register's 64 bytes.
const PARTS: usize = LANES / 16;

/// See [`super::products::exact`]; there are four activations per register.
#[target_feature(enable = "neon")]
pub(super) fn exact(codes: &[Register], x: &[f32], sums: &mut [f32; LANES]) {
    let mut parts: [float32x4_t; LANES / QUAD] = std::array::from_fn(|row| {
        // SAFETY: there are 64 sums.
        unsafe { vld1q_f32(sums.as_ptr().add(QUAD * row)) }
    });
    for (codes, x) in codes.iter().zip(x.as_chunks::<QUAD>().0) {
        // SAFETY: there are four activations.
        let x = unsafe { vld1q_f32(x.as_ptr()) };
        for (bytes, parts) in codes
            .0
            .as_chunks::<8>()
            .0
            .iter()
            .zip(parts.as_chunks_mut::<2>().0)
        {
            // SAFETY: there are eight bytes.
            let words = vmovl_s8(vreinterpret_s8_u8(unsafe { vld1_u8(bytes.as_ptr()) }));
            let wide = [vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)];
            for (part, wide) in parts.iter_mut().zip(wide) {
                *part = vfmaq_f32(*part, vcvtq_f32_s32(wide), x);
            }
        }
    }
    for (row, &part) in parts.iter().enumerate() {
        // SAFETY: there are 64 sums.
        unsafe { vst1q_f32(sums.as_mut_ptr().add(QUAD * row), part) }
    }
}

/// See [`super::products::bytes`].
#[target_feature(enable = "neon")]
pub(super) fn bytes(symbols: &[Register], x: &[i8]) -> [i32; BLOCK_ROWS] {
    match simd::has_dot_products() {
        // SAFETY: the processor has dot products.
        true => unsafe { bytes_by_dot_products(symbols, x) },
        // SAFETY: no dot products are used.
        false => unsafe { sums::<false>(symbols, x) },
    }
}

/// # Safety
/// The processor has NEON with dot products.
#[target_feature(enable = "neon,dotprod")]
unsafe fn bytes_by_dot_products(symbols: &[Register], x: &[i8]) -> [i32; BLOCK_ROWS] {
    // SAFETY: guaranteed by the caller.
    unsafe { sums::<true>(symbols, x) }
}

/// # Safety
/// If `DOT_PRODUCTS` is true, the processor must have dot products.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn sums<const DOT_PRODUCTS: bool>(symbols: &[Register], x: &[i8]) -> [i32; BLOCK_ROWS] {
    let mut sums = [vdupq_n_s32(0); PARTS];
    for (symbols, x) in symbols.iter().zip(x.as_chunks::<QUAD>().0) {
        let x = vreinterpretq_s8_u32(vdupq_n_u32(u32::from_le_bytes(x.map(|byte| byte as u8))));
        for (sum, symbols) in sums.iter_mut().zip(symbols.0.as_chunks::<16>().0) {
            // SAFETY: there are 16 bytes; the rest is guaranteed by the caller.
            *sum = unsafe { neon::dot::<DOT_PRODUCTS>(*sum, vld1q_u8(symbols.as_ptr()), x) };
        }
    }
    let mut rows = [0; BLOCK_ROWS];
    for (rows, &sum) in rows.as_chunks_mut::<4>().0.iter_mut().zip(&sums) {
        // SAFETY: there are four rows.
        unsafe { vst1q_s32(rows.as_mut_ptr(), sum) }
    }
    rows
}
