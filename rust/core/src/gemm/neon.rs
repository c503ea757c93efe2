//! What NEON kernels of several formats share: dot products of bytes, with the instructions of Armv8.2 or without.

use std::arch::aarch64::*;
use std::arch::asm;

/// `sum` + the dot product of each four unsigned bytes of codes with the four signed bytes of `x` beside them. Codes are
/// below 128, and `x` is at most 127 in magnitude.
///
/// # Safety
/// The processor has dot products of bytes if `DOT_PRODUCTS` says so.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn dot<const DOT_PRODUCTS: bool>(sum: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let codes = vreinterpretq_s8_u8(codes);
    if DOT_PRODUCTS {
        // SAFETY: the caller's.
        return unsafe { sdot(sum, codes, x) };
    }
    // Two products are at most 2 * 127 * 127 in magnitude: they fit 16 bits.
    let low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
    vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(codes, x)))
}

/// The instruction SDOT, whose intrinsic stable compilers lack.
///
/// # Safety
/// The processor has dot products of bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the processor has the instruction, which touches registers alone.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Four f16 values as f32. The instruction is of every 64-bit Arm, its intrinsic of recent compilers.
#[inline]
#[target_feature(enable = "neon")]
pub fn widen_f16(values: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the instruction is there, and touches registers alone.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {values:v}.4h",
            wide = lateout(vreg) wide, values = in(vreg) values,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// Asks for the cache line at an address, which need not be one, into the first-level cache.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a prefetch never faults and changes nothing that a program sees.
    unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
}
