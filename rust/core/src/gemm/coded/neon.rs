//! The products of a piece with NEON, which multiplies registers directly.

use std::arch::aarch64::*;

use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD, Register};
use crate::gemm::neon;
use crate::simd;

/// The vectors of a register's 64 bytes.
const PARTS: usize = LANES / 16;

/// The dot products of rows of bytes, below 128, with each of `x`, four bytes per register. Registers are read once.
#[target_feature(enable = "neon")]
pub(super) fn bytes<const N: usize>(symbols: &[Register], x: [&[i8]; N]) -> [[i32; BLOCK_ROWS]; N] {
    match simd::has_dot_products() {
        // SAFETY: the processor has dot products.
        true => unsafe { bytes_by_dot_products(symbols, x) },
        // SAFETY: no dot products are used.
        false => unsafe { sums::<false, N>(symbols, x) },
    }
}

/// # Safety
/// The processor has NEON with dot products.
#[target_feature(enable = "neon,dotprod")]
unsafe fn bytes_by_dot_products<const N: usize>(
    symbols: &[Register],
    x: [&[i8]; N],
) -> [[i32; BLOCK_ROWS]; N] {
    // SAFETY: guaranteed by the caller.
    unsafe { sums::<true, N>(symbols, x) }
}

/// Always inlined, because dot products are only inlined into functions that have them.
///
/// # Safety
/// The processor has NEON, and dot products if `DOT_PRODUCTS` is true.
#[inline(always)]
unsafe fn sums<const DOT_PRODUCTS: bool, const N: usize>(
    symbols: &[Register],
    x: [&[i8]; N],
) -> [[i32; BLOCK_ROWS]; N] {
    let (runs, rest) = symbols.as_chunks::<QUAD>();
    // SAFETY: the caller guarantees the instructions; a slice has 16 bytes, and a chunk four rows.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); PARTS]; N];
        for (number, run) in runs.iter().enumerate() {
            // The activations of four registers.
            let words = x.map(|x| vld1q_s8(x[QUAD * QUAD * number..][..QUAD * QUAD].as_ptr()));
            add::<DOT_PRODUCTS, 0, N>(&run[0], words, &mut sums);
            add::<DOT_PRODUCTS, 1, N>(&run[1], words, &mut sums);
            add::<DOT_PRODUCTS, 2, N>(&run[2], words, &mut sums);
            add::<DOT_PRODUCTS, 3, N>(&run[3], words, &mut sums);
        }
        for (number, symbols) in rest.iter().enumerate() {
            let words = x.map(|x| {
                let four = &x[QUAD * (QUAD * runs.len() + number)..][..QUAD];
                let word = [0, 1, 2, 3].map(|i| four[i] as u8);
                vreinterpretq_s8_u32(vdupq_n_u32(u32::from_le_bytes(word)))
            });
            add::<DOT_PRODUCTS, 0, N>(symbols, words, &mut sums);
        }
        sums.map(|sums| {
            let mut rows = [0; BLOCK_ROWS];
            for (rows, sum) in rows.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
                vst1q_s32(rows.as_mut_ptr(), sum);
            }
            rows
        })
    }
}

/// Adds the products of a register with word `WORD` of each token's activations.
///
/// # Safety
/// The processor has NEON, and dot products if `DOT_PRODUCTS` is true.
#[inline(always)]
unsafe fn add<const DOT_PRODUCTS: bool, const WORD: i32, const N: usize>(
    symbols: &Register,
    words: [int8x16_t; N],
    sums: &mut [[int32x4_t; PARTS]; N],
) {
    const { assert!(N <= 4) }
    // Written out: in a loop, compilers would keep the sums in memory.
    macro_rules! parts {
        ($($part:literal)*) => {
            $({
                let bytes = &symbols.0.as_chunks::<16>().0[$part];
                // SAFETY: there are 16 bytes, below 128; the rest is guaranteed by the caller.
                unsafe {
                    let bytes = vld1q_s8(bytes.as_ptr().cast());
                    parts!(@ $part bytes 0 1 2 3);
                }
            })*
        };
        (@ $part:literal $bytes:ident $($token:literal)*) => {
            $(if $token < N {
                let sum = &mut sums[$token][$part];
                *sum = neon::dot_word::<DOT_PRODUCTS, false, WORD>(*sum, $bytes, words[$token]);
            })*
        };
    }
    parts!(0 1 2 3);
}
