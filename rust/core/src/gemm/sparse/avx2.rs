//! 4-bit records with AVX2, including the addition of down columns: compiled portable code takes 1.5 times as long.

use std::arch::x86_64::*;

use super::pair::{BYTES, LANES, MIDDLE};
use super::term::{Term, group};
use super::token::Quantized;
use crate::formats::channels::{GROUP, Half};
use crate::gemm::dense;

/// The number of terms added together, limited by registers.
const RUN: usize = 4;

/// The product of half a record with a token; prefetches the values of `next`.
#[target_feature(enable = "avx2")]
pub fn dot(half: Half<'_>, next: Half<'_>, x: &Quantized) -> f32 {
    let (ones, low) = (_mm256_set1_epi16(1), _mm256_set1_epi8(15));
    let mut lanes = [_mm256_setzero_ps(); 2];
    for number in 0..half.values.len() / BYTES {
        let (codes, scale) = group::<BYTES>(half, next, number);
        let (pair, place) = (&x.pairs[number / 2], number % 2);
        let codes = load(codes);
        let halves = [
            _mm256_and_si256(codes, low),
            _mm256_and_si256(_mm256_srli_epi16::<4>(codes), low),
        ];
        // Four products are at most 4 * 15 * 128 in magnitude.
        let plane = |number: usize| {
            let [first, second] = [0, 1].map(|half| load(&pair.planes[number][half].as_chunks().0[place]));
            let products = _mm256_add_epi16(
                _mm256_maddubs_epi16(halves[0], first),
                _mm256_maddubs_epi16(halves[1], second),
            );
            _mm256_madd_epi16(products, ones)
        };
        let sum = _mm256_add_epi32(_mm256_slli_epi32::<8>(plane(0)), plane(1));
        let sum = _mm256_add_epi32(_mm256_slli_epi32::<8>(sum), plane(2));
        let middles: &[i32; LANES] = &pair.middles.as_chunks().0[place];
        // SAFETY: eight integers have 32 bytes.
        let middles = unsafe { _mm256_loadu_si256(middles.as_ptr().cast()) };
        let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, middles));
        let scale = _mm256_set1_ps(scale * x.scales[number]);
        lanes[place] = _mm256_add_ps(lanes[place], _mm256_mul_ps(scale, sum));
    }
    let mut sums = [[0.0; LANES]; 2];
    for (sums, lanes) in sums.iter_mut().zip(lanes) {
        // SAFETY: eight floats have 32 bytes.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), lanes) }
    }
    dense::fold(std::array::from_fn::<f32, { 2 * LANES }, _>(|lane| {
        sums[lane / LANES][lane % LANES]
    }))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; BYTES]) -> __m256i {
    // SAFETY: an array of 32 bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Adds terms in order to `y`, whose length is a multiple of a group.
#[target_feature(enable = "avx2")]
pub fn add(terms: &[Term<'_>], y: &mut [f32]) {
    let (runs, rest) = terms.as_chunks::<RUN>();
    runs.iter().for_each(|run| add_run(run, y));
    rest.iter()
        .for_each(|term| add_run(std::array::from_ref(term), y));
}

/// The lower and the upper byte of a code's value in bfloat16, which is exact.
const VALUES: [[u8; 16]; 2] = {
    let (mut bytes, mut code) = ([[0; 16]; 2], 0);
    while code < 16 {
        let bits = (code as f32 - MIDDLE as f32).to_bits();
        (bytes[0][code], bytes[1][code]) = ((bits >> 16) as u8, (bits >> 24) as u8);
        code += 1;
    }
    bytes
};

/// Adds terms in order to `y`, whose length is a multiple of a group. Shuffles convert codes to floats: conversions
/// of integers would take half as many operations again.
#[target_feature(enable = "avx2")]
#[allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.
fn add_run<const N: usize>(terms: &[Term<'_>; N], y: &mut [f32]) {
    // SAFETY: loads of arrays of 16 bytes.
    let (lower, upper) = unsafe {
        (
            _mm256_broadcastsi128_si256(_mm_loadu_si128(VALUES[0].as_ptr().cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(VALUES[1].as_ptr().cast())),
        )
    };
    let (low, zero) = (_mm256_set1_epi8(15), _mm256_setzero_si256());
    // Unpacking combines the same halves of two registers, so columns of one float register are moved there first.
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (number, y) in y.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let (mut codes, mut factors) = ([zero; N], [_mm256_setzero_ps(); N]);
        for i in 0..N {
            let (group, scale) = group::<BYTES>(terms[i].half, terms[i].next, number);
            codes[i] = _mm256_permutevar8x32_epi32(load(group), order);
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
                // SAFETY: four times eight of 32 floats.
                unsafe { _mm256_storeu_ps(y.add(8 * i), sums[i]) }
            }
        }
    }
}
