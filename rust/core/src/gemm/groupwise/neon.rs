//! Sixteen lanes on 64-bit Arm: four NEON registers, with dot products of bytes (Armv8.2), also with matrix products
//! (Armv8.6), or with neither.
//!
//! A dot product takes its activations from one word of a register, so a load serves four columns of four quads, and
//! all 16 rows share it. A matrix product multiplies eight columns of two rows by two lines, twice as many as a dot
//! product: two neighbouring quads of a register, zipped, are the columns of two pairs of rows. The sums of six lines
//! and the codes take 28 of 32 registers.

use std::arch::aarch64::*;

use super::Out;
use super::cursor::Weights;
use super::kernel::{self, Kernels, kernels};
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
    // SAFETY: the caller guarantees NEON and the arguments; products of bytes are detected here.
    unsafe {
        if simd::has_matrix_products() {
            kernel::compute::<Neon<true, true>>(weights, steps, tile, out);
        } else if simd::has_dot_products() {
            kernel::compute::<Neon<true, false>>(weights, steps, tile, out);
        } else {
            kernel::compute::<Neon<false, false>>(weights, steps, tile, out);
        }
    }
}

kernels!(Neon<false, false>, "neon");
kernels!(Neon<true, false>, "neon,dotprod");
kernels!(Neon<true, true>, "neon,dotprod,i8mm");

/// A whole block, with products of bytes as far as the processor has them. Matrix products imply dot products.
#[derive(Clone, Copy)]
struct Neon<const DOT_PRODUCTS: bool, const MATRIX: bool>;

impl<const DOT_PRODUCTS: bool, const MATRIX: bool> Neon<DOT_PRODUCTS, MATRIX> {
    /// Adds to `sum` the dot products of codes with word `WORD` of `x`.
    ///
    /// # Safety
    /// The processor has NEON and the products of bytes of the type; codes are below `2^BITS`.
    #[inline(always)]
    unsafe fn products<const BITS: usize, const WORD: i32>(
        sum: [uint32x4_t; PARTS],
        codes: [uint32x4_t; PARTS],
        x: int8x16_t,
    ) -> [uint32x4_t; PARTS] {
        // SAFETY: the caller guarantees NEON, and the products that are used.
        unsafe {
            // Signed products take codes below 128. Others are 128 more than their bytes with the highest bit flipped;
            // all rows share 128 times the sum of the activations.
            let (mut flip, mut shared) = (vdupq_n_u8(0), vdupq_n_s32(0));
            if BITS == 8 && !MATRIX {
                flip = vdupq_n_u8(0x80);
                shared = neon::dot_word::<DOT_PRODUCTS, true, WORD>(shared, vdupq_n_s8(64), x);
                shared = vaddq_s32(shared, shared);
            }
            parts(|i| {
                let sum = vaddq_s32(vreinterpretq_s32_u32(sum[i]), shared);
                let codes = vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_u32(codes[i]), flip));
                vreinterpretq_u32_s32(match MATRIX {
                    true => neon::usdot_word::<WORD>(sum, codes, x),
                    false if BITS == 8 => neon::dot_word::<DOT_PRODUCTS, true, WORD>(sum, codes, x),
                    false => neon::dot_word::<DOT_PRODUCTS, false, WORD>(sum, codes, x),
                })
            })
        }
    }
}

impl<const DOT_PRODUCTS: bool, const MATRIX: bool> Lanes for Neon<DOT_PRODUCTS, MATRIX> {
    const MATRIX: bool = MATRIX;
    const IN_PLACE: bool = true;
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
        // SAFETY: the caller guarantees NEON, the products of bytes, and a readable word at `x`.
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x.read_unaligned()));
            Self::products::<BITS, 0>(sum, codes, x)
        }
    }
    #[inline(always)]
    unsafe fn dot_word<const BITS: usize>(
        sum: Self::Int,
        codes: Self::Int,
        words: *const i32,
        at: usize,
    ) -> Self::Int {
        // SAFETY: the caller guarantees NEON and the products of bytes. The four words around word `at` are readable,
        // because the number of words is a multiple of four.
        unsafe {
            // One load serves four words: compilers combine equal loads.
            let x = vld1q_s8(words.add(at / 4 * 4).cast());
            match at % 4 {
                0 => Self::products::<BITS, 0>(sum, codes, x),
                1 => Self::products::<BITS, 1>(sum, codes, x),
                2 => Self::products::<BITS, 2>(sum, codes, x),
                _ => Self::products::<BITS, 3>(sum, codes, x),
            }
        }
    }
    #[inline(always)]
    unsafe fn add_matrix(
        [first, second]: [Self::Int; 2],
        [even, odd]: [Self::Int; 2],
        words: *const i32,
        stride: usize,
    ) -> [Self::Int; 2] {
        // SAFETY: the caller guarantees matrix products, two readable words at `words` and two `stride` words later.
        unsafe {
            let (x, next) = (vld1_s32(words), vld1_s32(words.add(stride)));
            // The eight bytes of one line, then those of the other.
            let x = vreinterpretq_s8_s32(vcombine_s32(vzip1_s32(x, next), vzip2_s32(x, next)));
            // Of the four rows of a register, `first` has the sums of two with both lines, and `second` the others.
            let add = |sum: uint32x4_t, rows: uint32x4_t| {
                let (sum, rows) = (vreinterpretq_s32_u32(sum), vreinterpretq_s8_u32(rows));
                vreinterpretq_u32_s32(neon::usmmla(sum, rows, x))
            };
            [
                parts(|i| add(first[i], vzip1q_u32(even[i], odd[i]))),
                parts(|i| add(second[i], vzip2q_u32(even[i], odd[i]))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn separate([first, second]: [Self::Int; 2]) -> [Self::Int; 2] {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            [
                parts(|i| vuzp1q_u32(first[i], second[i])),
                parts(|i| vuzp2q_u32(first[i], second[i])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn scale_down(sums: Self::Int, bits: u32) -> Self::Int {
        // SAFETY: the caller guarantees NEON.
        sums.map(|sums| unsafe {
            let sums = vreinterpretq_s32_u32(sums);
            vreinterpretq_u32_s32(match bits {
                2 => vshrq_n_s32::<2>(sums),
                3 => vshrq_n_s32::<3>(sums),
                4 => vshrq_n_s32::<4>(sums),
                _ => vshlq_s32(sums, vdupq_n_s32(-(bits as i32))),
            })
        })
    }
    #[inline(always)]
    unsafe fn extract<const BITS: usize>(words: Self::Int, shift: u32) -> Self::Int {
        // Bytes are shifted, not words: nothing enters from above, so the highest codes of a byte need no mask.
        let mask = match shift as usize + BITS {
            8 => u8::MAX,
            _ => u8::MAX >> (8 - BITS),
        };
        // SAFETY: the caller guarantees NEON.
        words.map(|words| unsafe {
            let bytes = neon::shift_bytes(vreinterpretq_u8_u32(words), shift);
            vreinterpretq_u32_u8(vandq_u8(bytes, vdupq_n_u8(mask)))
        })
    }
    #[inline(always)]
    unsafe fn join(low: Self::Int, high: Self::Int, at: u32) -> Self::Int {
        // The high bit at the top of its byte, the low bits inserted below it, and the three moved down.
        // SAFETY: the caller guarantees NEON.
        parts(|i| unsafe {
            let (low, high) = (vreinterpretq_u8_u32(low[i]), vreinterpretq_u8_u32(high[i]));
            let high = match at {
                6 => vshlq_n_u8::<1>(high),
                _ => high,
            };
            vreinterpretq_u32_u8(vshrq_n_u8::<5>(neon::insert_below(high, low)))
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
