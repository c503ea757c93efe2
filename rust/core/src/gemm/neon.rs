//! Helpers shared by the NEON kernels of several formats: dot products of bytes, with or without the Armv8.2
//! instructions.

use std::arch::aarch64::*;
use std::arch::asm;

/// Adds to `sum` the dot products of each four unsigned bytes of codes with the corresponding four signed bytes of
/// `x`. Codes are below 128, and `x` is at most 127 in magnitude.
///
/// # Safety
/// If `DOT_PRODUCTS` is true, the processor must have dot products of bytes.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn dot<const DOT_PRODUCTS: bool>(sum: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let codes = vreinterpretq_s8_u8(codes);
    if DOT_PRODUCTS {
        // SAFETY: the caller guarantees dot products.
        return unsafe { sdot(sum, codes, x) };
    }
    // Two products are at most 2 * 127 * 127 in magnitude: they fit 16 bits.
    let low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
    vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(codes, x)))
}

/// The SDOT instruction, which has no intrinsic in stable compilers.
///
/// # Safety
/// The processor has dot products of bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the processor has the instruction, which only touches registers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Converts four f16 values to f32. Every 64-bit Arm processor has the instruction; only recent compilers have its
/// intrinsic.
#[inline]
#[target_feature(enable = "neon")]
pub fn widen_f16(values: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the instruction exists and only touches registers.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {values:v}.4h",
            wide = lateout(vreg) wide, values = in(vreg) values,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// Prefetches the cache line at an address, which may be invalid, into the first-level cache.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a prefetch never faults and has no visible effect.
    unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
}
