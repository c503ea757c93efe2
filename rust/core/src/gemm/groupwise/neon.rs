//! Sixteen lanes on 64-bit Arm: four NEON registers, with or without dot products of bytes (Armv8.2).
//!
//! All 16 rows share each broadcast of activations; the sums of six lines and the codes take 28 of 32 registers.

use std::arch::aarch64::*;

use super::Out;
use super::kernel::{self, Weights};
use super::lanes::Lanes;
use super::tile::{Steps, Tile};
use crate::gemm::neon;
use crate::simd;

/// The registers of 16 lanes.
const PARTS: usize = 4;

/// Multiplies a block by a tile.
///
/// # Safety
/// The processor has NEON, `steps` belong to `weights.layout`, and the tile belongs to `steps` ([`Tile::is_of`]).
pub(super) unsafe fn compute(weights: &[Weights; 1], steps: &Steps, tile: &Tile, out: &mut [Out; 1]) {
    // SAFETY: the caller guarantees NEON and the arguments; dot products are detected here.
    unsafe {
        match simd::has_dot_products() {
            true => compute_by_dot_products(weights, steps, tile, out),
            false => kernel::compute::<Neon<false>>(weights, steps, tile, out),
        }
    }
}

/// # Safety
/// The processor has NEON with dot products; the rest is as in [`kernel::compute`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn compute_by_dot_products(weights: &[Weights; 1], steps: &Steps, tile: &Tile, out: &mut [Out; 1]) {
    // SAFETY: the function has the features of the lanes; the caller guarantees steps and tile.
    unsafe { kernel::compute::<Neon<true>>(weights, steps, tile, out) }
}

/// A whole block.
#[derive(Clone, Copy)]
struct Neon<const DOT_PRODUCTS: bool>;

impl<const DOT_PRODUCTS: bool> Lanes for Neon<DOT_PRODUCTS> {
    type Int = [uint32x4_t; PARTS];
    type Float = [float32x4_t; PARTS];

    #[inline(always)]
    unsafe fn int_zero() -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        [unsafe { vdupq_n_u32(0) }; PARTS]
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self::Int {
        // SAFETY: the caller guarantees NEON and 64 readable bytes at `from`.
        parts(|i| unsafe { vreinterpretq_u32_u8(vld1q_u8(from.add(16 * i))) })
    }
    #[inline(always)]
    unsafe fn shift(words: Self::Int, shift: u32) -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        words.map(|words| unsafe { vshlq_u32(words, vdupq_n_s32(-(shift as i32))) })
    }
    #[inline(always)]
    unsafe fn mask(words: Self::Int, mask: u32) -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        words.map(|words| unsafe { vandq_u32(words, vdupq_n_u32(mask)) })
    }
    #[inline(always)]
    unsafe fn blend(low: Self::Int, high: Self::Int, mask: u32) -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        parts(|i| unsafe { vbslq_u32(vdupq_n_u32(mask), low[i], high[i]) })
    }
    #[inline(always)]
    unsafe fn store_int(words: Self::Int, to: *mut u8) {
        for (i, words) in words.into_iter().enumerate() {
            // SAFETY: the caller guarantees NEON and 64 writable bytes at `to`.
            unsafe { vst1q_u8(to.add(16 * i), vreinterpretq_u8_u32(words)) }
        }
    }
    #[inline(always)]
    unsafe fn int_add(a: Self::Int, b: Self::Int) -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        parts(|i| unsafe { vaddq_u32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn dot<const BITS: usize>(sum: Self::Int, codes: Self::Int, x: *const i32) -> Self::Int {
        // SAFETY: the caller guarantees NEON, dot products if `DOT_PRODUCTS`, and a readable word at `x`; codes of four
        // bits are below 16.
        parts(|i| unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x.read_unaligned()));
            let (sum, codes) = (vreinterpretq_s32_u32(sum[i]), vreinterpretq_u8_u32(codes[i]));
            if BITS < 8 {
                return vreinterpretq_u32_s32(neon::dot::<DOT_PRODUCTS>(sum, codes, x));
            }
            // Dot products take signed bytes, so codes are split into halves of four bits.
            let low = neon::dot::<DOT_PRODUCTS>(sum, vandq_u8(codes, vdupq_n_u8(15)), x);
            let high = neon::dot::<DOT_PRODUCTS>(vdupq_n_s32(0), vshrq_n_u8::<4>(codes), x);
            vreinterpretq_u32_s32(vaddq_s32(low, vshlq_n_s32::<4>(high)))
        })
    }
    #[inline(always)]
    unsafe fn to_float(words: Self::Int) -> Self::Float {
        // SAFETY: the caller guarantees NEON.
        words.map(|words| unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(words)) })
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Float {
        // SAFETY: the caller guarantees NEON.
        [unsafe { vdupq_n_f32(0.0) }; PARTS]
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> Self::Float {
        // SAFETY: the caller guarantees NEON and a readable float at `from`.
        [unsafe { vdupq_n_f32(from.read_unaligned()) }; PARTS]
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::Float {
        // SAFETY: the caller guarantees NEON and 32 readable bytes at `from`.
        parts(|i| unsafe { neon::widen_f16(vreinterpret_u16_u8(vld1_u8(from.add(8 * i)))) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::Float {
        // SAFETY: the caller guarantees NEON and 32 readable bytes at `from`.
        parts(|i| unsafe {
            let bits = vreinterpret_u16_u8(vld1_u8(from.add(8 * i)));
            vreinterpretq_f32_u32(vshll_n_u16::<16>(bits))
        })
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: the caller guarantees NEON.
        parts(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn add_product(sum: Self::Float, a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: the caller guarantees NEON.
        parts(|i| unsafe { vfmaq_f32(sum[i], a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn store(values: Self::Float, to: *mut f32) {
        for (i, values) in values.into_iter().enumerate() {
            // SAFETY: the caller guarantees NEON and 64 writable bytes at `to`.
            unsafe { vst1q_f32(to.add(4 * i), values) }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        neon::prefetch(at);
    }
}

/// An array of the results of a function for each register.
#[inline(always)]
fn parts<T>(of: impl Fn(usize) -> T) -> [T; PARTS] {
    std::array::from_fn(of)
}
