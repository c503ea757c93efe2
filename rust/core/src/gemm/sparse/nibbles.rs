//! Products with gate rows of 4 bits, of integers: four times as many weights share an instruction as with floats.
//!
//! A token's activations are quantized to 24 bits for each group, as those of group-wise tensors are
//! ([`crate::gemm::groupwise`]): three planes of signed bytes, each worth 256 of the next. Eight lanes add up eight products
//! of a group each, which stay below 2^30, so every instruction set gives the same bits.

use super::rows::groups;
use crate::formats::channels::{GROUP, Half};
use crate::gemm::dense;
use crate::gemm::groupwise::{Precision, STEP_COLUMNS, digit, quantize};
use crate::simd::Isa;

/// Bytes of a group's codes: the first half of the columns in the low bits, the second in the high ones.
const BYTES: usize = GROUP / 2;
const LANES: usize = 8;
/// What is subtracted from a stored code.
const MIDDLE: i32 = 8;

/// A token's activations of a group.
pub struct Group {
    /// The most significant plane first.
    planes: [[u8; GROUP]; 3],
    /// The sum of each lane's integers times [`MIDDLE`].
    middles: [i32; LANES],
    /// What an integer's unit is worth.
    scale: f32,
}

impl Group {
    /// Quantizes the activations of a group.
    pub fn new(values: &[f32; GROUP]) -> Group {
        let mut codes = [0; STEP_COLUMNS];
        let (scale, _) = quantize(values, Precision::Exact, &mut codes);
        let mut middles = [0; LANES];
        for (column, code) in codes[..GROUP].iter().enumerate() {
            middles[column % BYTES / 4] += MIDDLE * code;
        }
        Group {
            planes: [16, 8, 0].map(|shift| std::array::from_fn(|column| digit(codes[column], shift))),
            middles,
            scale,
        }
    }
}

/// The product of half a record and a token; asks for the values of `next`. The processor runs `isa`.
pub fn dot(isa: Isa, half: Half<'_>, next: Half<'_>, x: &[Group]) -> f32 {
    match isa {
        // SAFETY: every set of x86-64 but the scalar one has AVX2.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { x86::dot(half, next, x) },
        _ => portable(half, next, x),
    }
}

#[inline(always)]
fn portable(half: Half<'_>, next: Half<'_>, x: &[Group]) -> f32 {
    let mut lanes = [0.0; LANES];
    for ((codes, scale), x) in groups::<BYTES>(half, next).zip(x) {
        let integer = |column: usize| {
            let [high, middle, low] = x.planes.map(|plane| i32::from(plane[column] as i8));
            (high * 256 + middle) * 256 + low
        };
        for (lane, total) in lanes.iter_mut().enumerate() {
            let products = (4 * lane..4 * lane + 4).map(|byte| {
                let code = i32::from(codes[byte]);
                (code & 15) * integer(byte) + (code >> 4) * integer(BYTES + byte)
            });
            *total += scale * x.scale * (products.sum::<i32>() - x.middles[lane]) as f32;
        }
    }
    dense::fold(lanes)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn dot(half: Half<'_>, next: Half<'_>, x: &[Group]) -> f32 {
        // SAFETY: loads are of arrays of 32 bytes, and need no alignment.
        let load = |bytes: &[u8; BYTES]| unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        let (ones, low) = (_mm256_set1_epi16(1), _mm256_set1_epi8(15));
        let mut lanes = _mm256_setzero_ps();
        for ((codes, scale), x) in groups::<BYTES>(half, next).zip(x) {
            let codes = load(codes);
            let halves = [
                _mm256_and_si256(codes, low),
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low),
            ];
            // Four products are at most 4 * 15 * 128 in magnitude.
            let plane = |number: usize| {
                let [first, second] = [0, 1].map(|half| load(&x.planes[number].as_chunks().0[half]));
                let products = _mm256_add_epi16(
                    _mm256_maddubs_epi16(halves[0], first),
                    _mm256_maddubs_epi16(halves[1], second),
                );
                _mm256_madd_epi16(products, ones)
            };
            let sum = _mm256_add_epi32(_mm256_slli_epi32::<8>(plane(0)), plane(1));
            let sum = _mm256_add_epi32(_mm256_slli_epi32::<8>(sum), plane(2));
            // SAFETY: eight integers have 32 bytes.
            let middles = unsafe { _mm256_loadu_si256(x.middles.as_ptr().cast()) };
            let sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, middles));
            lanes = _mm256_add_ps(lanes, _mm256_mul_ps(_mm256_set1_ps(scale * x.scale), sum));
        }
        let mut sums = [0.0; LANES];
        // SAFETY: eight floats have 32 bytes.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), lanes) }
        dense::fold(sums)
    }
}
