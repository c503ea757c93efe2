//! Helpers shared by the NEON kernels of several formats: dot products of bytes, with or without the instructions of
//! Armv8.2 (`dotprod`), and matrix products of bytes (`i8mm`, Armv8.6).
//!
//! SVE and SVE2 are not used: stable compilers have no intrinsics for them, and processors with 128-bit SVE registers
//! would gain little over the same products with NEON.

use std::arch::aarch64::*;
use std::arch::asm;

/// Adds to `sum` the dot products of each four signed bytes of `a` with the corresponding four of `b`. `FULL` must be
/// true if both may hold -128.
///
/// # Safety
/// If `DOT_PRODUCTS` is true, the processor must have dot products of bytes.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn dot<const DOT_PRODUCTS: bool, const FULL: bool>(
    sum: int32x4_t,
    a: int8x16_t,
    b: int8x16_t,
) -> int32x4_t {
    if DOT_PRODUCTS {
        // SAFETY: the caller guarantees dot products.
        return unsafe { sdot(sum, a, b) };
    }
    let (low, high) = (vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    match FULL {
        true => vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))),
        // Two products are at most 2 * 127 * 128 in magnitude: they fit 16 bits.
        false => vpadalq_s16(sum, vpaddq_s16(low, high)),
    }
}

/// Like [`dot`], with the four bytes of word `WORD` of `b` for every four bytes of `a`.
///
/// # Safety
/// If `DOT_PRODUCTS` is true, the processor must have dot products of bytes.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn dot_word<const DOT_PRODUCTS: bool, const FULL: bool, const WORD: i32>(
    sum: int32x4_t,
    a: int8x16_t,
    b: int8x16_t,
) -> int32x4_t {
    // SAFETY: the caller guarantees dot products if they are used.
    unsafe {
        match DOT_PRODUCTS {
            true => sdot_word::<WORD>(sum, a, b),
            false => {
                let word = vdupq_laneq_s32::<WORD>(vreinterpretq_s32_s8(b));
                dot::<false, FULL>(sum, a, vreinterpretq_s8_s32(word))
            }
        }
    }
}

/// Defines a function of one instruction `sum += f(a, b)`, which has no intrinsic in stable compilers.
macro_rules! products {
    ($(#[$attribute:meta])* $name:ident, $features:literal, $text:literal $(, $word:ident)?) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// The processor has the instruction.
        #[inline]
        #[target_feature(enable = $features)]
        pub unsafe fn $name$(<const $word: i32>)?(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
            let mut sum = sum;
            // SAFETY: the processor has the instruction, which only touches registers.
            unsafe {
                asm!(
                    $text,
                    sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b, $(word = const $word,)?
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            sum
        }
    };
}

products! {
    /// The dot products of [`dot`].
    sdot, "neon,dotprod", "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b"
}
products! {
    /// The dot products of [`dot_word`].
    sdot_word, "neon,dotprod", "sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{word}]", WORD
}
products! {
    /// Like [`sdot_word`], with unsigned bytes in `a`.
    usdot_word, "neon,i8mm", "usdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{word}]", WORD
}
products! {
    /// Adds the product of two matrices to the 2 x 2 words of `sum`, row by row: `a` has two rows of eight unsigned
    /// bytes, and `b` two columns of eight signed bytes.
    usmmla, "neon,i8mm", "usmmla {sum:v}.4s, {a:v}.16b, {b:v}.16b"
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

/// The register shifted right by `count`, byte by byte; zeros enter.
///
/// `count` should be a constant after inlining; otherwise the shift is a branch.
#[inline]
#[target_feature(enable = "neon")]
pub fn shift_bytes(bytes: uint8x16_t, count: u32) -> uint8x16_t {
    match count {
        0 => bytes,
        1 => vshrq_n_u8::<1>(bytes),
        2 => vshrq_n_u8::<2>(bytes),
        3 => vshrq_n_u8::<3>(bytes),
        4 => vshrq_n_u8::<4>(bytes),
        5 => vshrq_n_u8::<5>(bytes),
        6 => vshrq_n_u8::<6>(bytes),
        7 => vshrq_n_u8::<7>(bytes),
        _ => vdupq_n_u8(0),
    }
}

/// The bits of `bytes` that `mask` selects, and those of `others` elsewhere, in one operation. Compilers turn the
/// intrinsic into two if the other operands are constants.
#[inline]
#[target_feature(enable = "neon")]
pub fn select(mask: uint8x16_t, bytes: uint8x16_t, others: uint8x16_t) -> uint8x16_t {
    let mut selected = bytes;
    // SAFETY: the instruction belongs to NEON, which the function has, and only touches registers.
    unsafe {
        asm!(
            "bif {selected:v}.16b, {others:v}.16b, {mask:v}.16b",
            selected = inout(vreg) selected, others = in(vreg) others, mask = in(vreg) mask,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    selected
}

/// The highest bit of each byte of `high`, and below it the seven highest of `low`, in one operation. Compilers turn the
/// intrinsic into several.
#[inline]
#[target_feature(enable = "neon")]
pub fn insert_below(high: uint8x16_t, low: uint8x16_t) -> uint8x16_t {
    let mut joined = high;
    // SAFETY: the instruction belongs to NEON, which the function has, and only touches registers.
    unsafe {
        asm!(
            "sri {joined:v}.16b, {low:v}.16b, #1",
            joined = inout(vreg) joined, low = in(vreg) low,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    joined
}

/// Prefetches the cache line at an address, which may be invalid, into the first-level cache.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a prefetch never faults and has no visible effect.
    unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
}

/// Prefetches the cache line at an address, which may be invalid, into the second-level cache.
#[inline(always)]
pub fn prefetch_near(at: *const u8) {
    // SAFETY: a prefetch never faults and has no visible effect.
    unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd;

    /// Sixteen bytes, among them the extremes.
    fn bytes(seed: usize) -> [i8; 16] {
        std::array::from_fn(|i| {
            [-128, 127, -127, 0, 1, -1, 93, -58][(7 * i + i / 3 + seed) * (seed + 3) / 5 % 8]
        })
    }

    fn load(bytes: [i8; 16]) -> int8x16_t {
        // SAFETY: NEON belongs to every 64-bit Arm target; there are 16 bytes.
        unsafe { vld1q_s8(bytes.as_ptr()) }
    }

    fn words(vector: int32x4_t) -> [i32; 4] {
        let mut words = [0; 4];
        // SAFETY: NEON belongs to every 64-bit Arm target; there are four words.
        unsafe { vst1q_s32(words.as_mut_ptr(), vector) };
        words
    }

    /// The sums of the products of `count` bytes each, at `places` of a and b.
    fn expected(count: usize, places: impl Fn(usize, usize) -> i32) -> [i32; 4] {
        std::array::from_fn(|lane| (0..count).map(|i| places(lane, i)).sum::<i32>() + 5)
    }

    #[test]
    fn dot_products_are_those_of_any_two_bytes() {
        // SAFETY: NEON belongs to every 64-bit Arm target.
        let five = unsafe { vdupq_n_s32(5) };
        let extremes = [-128; 16];
        for seed in 0..40 {
            let (a, b) = match seed {
                0 => (extremes, extremes),
                _ => (bytes(seed), bytes(3 * seed + 1)),
            };
            let product = |x: i8, y: i8| i32::from(x) * i32::from(y);
            let dots = expected(4, |lane, i| product(a[4 * lane + i], b[4 * lane + i]));
            let of_word = expected(4, |lane, i| product(a[4 * lane + i], b[8 + i]));
            let (x, y) = (load(a), load(b));
            // SAFETY: NEON is there, as above; the others are detected.
            unsafe {
                assert_eq!(words(dot::<false, true>(five, x, y)), dots);
                assert_eq!(words(dot_word::<false, true, 2>(five, x, y)), of_word);
                if !a.contains(&-128) || !b.contains(&-128) {
                    assert_eq!(words(dot::<false, false>(five, x, y)), dots);
                }
                if simd::has_dot_products() {
                    assert_eq!(words(dot::<true, false>(five, x, y)), dots);
                    assert_eq!(words(dot_word::<true, false, 2>(five, x, y)), of_word);
                }
                if simd::has_matrix_products() {
                    let unsigned = |x: i8, y: i8| i32::from(x as u8) * i32::from(y);
                    let of_word = expected(4, |lane, i| unsigned(a[4 * lane + i], b[8 + i]));
                    assert_eq!(words(usdot_word::<2>(five, x, y)), of_word);
                    let matrix = expected(8, |lane, i| unsigned(a[lane / 2 * 8 + i], b[lane % 2 * 8 + i]));
                    assert_eq!(words(usmmla(five, x, y)), matrix);
                }
            }
        }
    }

    #[test]
    fn selected_bits_are_those_of_the_mask() {
        let [mask, a, b] = [1, 2, 3].map(|seed| bytes(seed).map(|byte| byte as u8));
        let mut found = [0; 16];
        // SAFETY: NEON belongs to every 64-bit Arm target; the arrays have 16 bytes.
        unsafe {
            let [mask, a, b] = [mask, a, b].map(|bytes| vld1q_u8(bytes.as_ptr()));
            vst1q_u8(found.as_mut_ptr(), select(mask, a, b));
        }
        let wanted: [u8; 16] = std::array::from_fn(|i| a[i] & mask[i] | b[i] & !mask[i]);
        assert_eq!(found, wanted);
    }

    #[test]
    fn bits_are_inserted_below_the_highest() {
        let [high, low] = [1, 2].map(|seed| bytes(seed).map(|byte| byte as u8));
        let mut found = [0; 16];
        // SAFETY: NEON belongs to every 64-bit Arm target; the arrays have 16 bytes.
        unsafe {
            let joined = insert_below(vld1q_u8(high.as_ptr()), vld1q_u8(low.as_ptr()));
            vst1q_u8(found.as_mut_ptr(), joined);
        }
        let wanted: [u8; 16] = std::array::from_fn(|i| high[i] & 0x80 | low[i] >> 1);
        assert_eq!(found, wanted);
    }

    #[test]
    fn bytes_are_shifted_without_their_neighbours() {
        let given = bytes(4).map(|byte| byte as u8);
        for count in 0..=8 {
            let mut found = [0; 16];
            // SAFETY: NEON belongs to every 64-bit Arm target; the arrays have 16 bytes.
            unsafe { vst1q_u8(found.as_mut_ptr(), shift_bytes(vld1q_u8(given.as_ptr()), count)) };
            assert_eq!(found, given.map(|byte| byte.checked_shr(count).unwrap_or(0)));
        }
    }
}
