//! Products with gate rows of 4 bits, of integers: four times as many weights share an instruction as with floats. On AVX2
//! down columns of 4 bits are added here, too: what compilers make of the portable code takes half as long again.
//!
//! A token's activations are quantized to 24 bits for each group, as those of group-wise tensors are
//! ([`crate::gemm::groupwise`]): three planes of signed bytes, each worth 256 of the next. Eight lanes add up eight products
//! of a group each, which stay below 2^30, so every instruction set gives the same bits.

#[cfg(target_arch = "x86_64")]
use super::rows::Term;
use super::rows::group;
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

/// Adds terms to `y`, which has whole groups, in their order.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
pub unsafe fn add(terms: &[Term<'_>], y: &mut [f32]) {
    let (runs, rest) = terms.as_chunks::<{ super::rows::RUN }>();
    // SAFETY: the caller's.
    unsafe {
        runs.iter().for_each(|run| x86::add(run, y));
        rest.iter()
            .for_each(|term| x86::add(std::array::from_ref(term), y));
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
    for (number, x) in x.iter().enumerate() {
        let (codes, scale) = group::<BYTES>(half, next, number);
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
        for (number, x) in x.iter().enumerate() {
            let (codes, scale) = group::<BYTES>(half, next, number);
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

    /// The lower and the upper byte of what a code is worth, as bfloat16, which holds it exactly.
    const VALUES: [[u8; 16]; 2] = {
        let (mut bytes, mut code) = ([[0; 16]; 2], 0);
        while code < 16 {
            let bits = (code as f32 - MIDDLE as f32).to_bits();
            (bytes[0][code], bytes[1][code]) = ((bits >> 16) as u8, (bits >> 24) as u8);
            code += 1;
        }
        bytes
    };

    /// Adds terms to `y`, which has whole groups, in their order. Codes become floats by shuffles alone: a conversion of
    /// integers takes half as many operations again.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    #[allow(clippy::needless_range_loop)] // Registers in arrays: an index says best which.
    pub unsafe fn add<const N: usize>(terms: &[Term<'_>; N], y: &mut [f32]) {
        // SAFETY: loads of arrays of 16 bytes.
        let (lower, upper) = unsafe {
            (
                _mm256_broadcastsi128_si256(_mm_loadu_si128(VALUES[0].as_ptr().cast())),
                _mm256_broadcastsi128_si256(_mm_loadu_si128(VALUES[1].as_ptr().cast())),
            )
        };
        let (low, zero) = (_mm256_set1_epi8(15), _mm256_setzero_si256());
        // Unpacking takes what lies in the same half of two registers: columns of one register of floats are put there.
        let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        for (number, y) in y.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            let (mut codes, mut factors) = ([zero; N], [_mm256_setzero_ps(); N]);
            for i in 0..N {
                let (group, scale) = group::<BYTES>(terms[i].half, terms[i].next, number);
                // SAFETY: a load of an array of 32 bytes.
                let group = unsafe { _mm256_loadu_si256(group.as_ptr().cast()) };
                codes[i] = _mm256_permutevar8x32_epi32(group, order);
                factors[i] = _mm256_set1_ps(terms[i].factor * scale);
            }
            for y in y.as_chunks_mut::<BYTES>().0 {
                let (y, mut sums) = (y.as_mut_ptr(), [_mm256_setzero_ps(); 4]);
                for i in 0..4 {
                    // SAFETY: four times eight of 32 floats.
                    sums[i] = unsafe { _mm256_loadu_ps(y.add(8 * i)) };
                }
                for i in 0..N {
                    let own = _mm256_and_si256(codes[i], low);
                    codes[i] = _mm256_srli_epi16::<4>(codes[i]);
                    let bytes = (_mm256_shuffle_epi8(lower, own), _mm256_shuffle_epi8(upper, own));
                    let words = [
                        _mm256_unpacklo_epi8(bytes.0, bytes.1),
                        _mm256_unpackhi_epi8(bytes.0, bytes.1),
                    ];
                    for j in 0..2 {
                        let first = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words[j]));
                        let second = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words[j]));
                        sums[2 * j] = _mm256_add_ps(sums[2 * j], _mm256_mul_ps(factors[i], first));
                        sums[2 * j + 1] = _mm256_add_ps(sums[2 * j + 1], _mm256_mul_ps(factors[i], second));
                    }
                }
                for i in 0..4 {
                    // SAFETY: as above.
                    unsafe { _mm256_storeu_ps(y.add(8 * i), sums[i]) }
                }
            }
        }
    }
}
