//! Products with half a record on AVX-512, in the order of [`super::rows`] and [`super::nibbles`].
//!
//! Operation counts for 64 columns, besides loads: a 4-bit gate row takes 9 operations, one of 8 or 16 bits 17; a
//! 4-bit down column takes 13, one of 8 or 16 bits 16. The contributions of 4-bit codes are looked up: the 16
//! products of a group's codes with its factor fill a register.

use std::arch::x86_64::*;

use super::pair::{BYTES, LANES as PAIR_LANES, MIDDLE, Pair};
use super::term::{LANES, Term};
use super::token::{Quantized, SCALES};
use crate::formats::channels::{GROUP, Width};
use crate::gemm::dense;
use crate::types::from_bf16;

/// Divides terms into runs of 8, 4, 2 and 1 and calls, for each, the expression after the index of its first term:
/// terms of a run are read side by side, which is faster than sequentially.
macro_rules! runs {
    ($terms:expr, |$first:ident, $run:ident| $call:expr) => {
        let (mut rest, mut $first) = ($terms, 0);
        runs!(@ rest, $first, $run, $call, 8, 4, 2, 1);
    };
    (@ $rest:ident, $first:ident, $run:ident, $call:expr, $($count:literal),*) => {
        $(while let Some(($run, behind)) = $rest.split_first_chunk::<$count>() {
            $call;
            ($rest, $first) = (behind, $first + $count);
        })*
        debug_assert!($rest.is_empty());
    };
}

/// The code bytes of two groups.
const PAIR: usize = 2 * BYTES;

/// The products of 4-bit half records with a token; prefetches the values needed next.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn dot_nibbles(terms: &[Term<'_>], x: &Quantized, out: &mut [f32]) {
    runs!(terms, |first, run| out[first..first + run.len()]
        .copy_from_slice(&dot_pairs(run, x)));
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.
fn dot_pairs<const N: usize>(terms: &[Term<'_>; N], x: &Quantized) -> [f32; N] {
    let (mut lanes, bytes) = ([_mm512_setzero_ps(); N], terms[0].half.values.len());
    assert!(bytes.is_multiple_of(BYTES) && x.pairs.len() == bytes.div_ceil(PAIR));
    for term in terms {
        assert!(term.half.values.len() == bytes && term.next.values.len() == bytes);
    }
    for (first, (pairs, own)) in x.pairs.chunks(SCALES / 2).zip(x.scales.as_chunks().0).enumerate() {
        let (mut factors, own) = ([[0.0; SCALES]; N], load(own));
        for i in 0..N {
            factors[i] = floats(_mm512_mul_ps(
                own,
                widened(&terms[i].half.scales[first * SCALES..]),
            ));
        }
        for (number, x) in pairs.iter().enumerate() {
            let at = (first * SCALES / 2 + number) * PAIR;
            for i in 0..N {
                let values = terms[i].half.values.as_ptr();
                // SAFETY: all halves have the codes of this pair, or of only its first group, because they consist of
                // as many whole groups as the pairs of `x` hold. A prefetch may use any address.
                let codes = unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(terms[i].next.values.as_ptr().add(at).cast());
                    match at + PAIR <= bytes {
                        true => _mm512_loadu_si512(values.add(at).cast()),
                        false => _mm512_zextsi256_si512(_mm256_loadu_si256(values.add(at).cast())),
                    }
                };
                let factors = &factors[i].as_chunks().0[number];
                lanes[i] = _mm512_add_ps(lanes[i], products(codes, x, factors));
            }
        }
    }
    lanes.map(|lanes| dense::fold(floats(lanes)))
}

/// The products of two groups' codes and a token's activations, by lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn products(codes: __m512i, x: &Pair, factors: &[f32; 2]) -> __m512 {
    let low = _mm512_set1_epi8(15);
    let halves = [
        _mm512_and_si512(codes, low),
        _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low),
    ];
    // SAFETY: 16 integers have 64 bytes; the load needs no alignment.
    let middles = unsafe { _mm512_loadu_si512(x.middles.as_ptr().cast()) };
    let mut sums = [_mm512_setzero_si512(), _mm512_setzero_si512(), middles];
    for (sum, plane) in sums.iter_mut().zip(&x.planes) {
        for (half, plane) in halves.into_iter().zip(plane) {
            // SAFETY: half a plane has 64 bytes; the load needs no alignment.
            let plane = unsafe { _mm512_loadu_si512(plane.as_ptr().cast()) };
            *sum = _mm512_dpbusd_epi32(*sum, half, plane);
        }
    }
    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0]), sums[1]);
    let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(sum), sums[2]));
    let [first, second] = factors.map(|factor| _mm512_set1_ps(factor));
    _mm512_mul_ps(_mm512_mask_blend_ps(u16::MAX << PAIR_LANES, first, second), sum)
}

/// The products of half records of 8 bits, or of bf16, with a token; prefetches the values needed next.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub fn dot(width: Width, terms: &[Term<'_>], x: &[f32], out: &mut [f32]) {
    runs!(terms, |first, run| out[first..first + run.len()]
        .copy_from_slice(&dot_run(width, run, x)));
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_run<const N: usize>(width: Width, terms: &[Term<'_>; N], x: &[f32]) -> [f32; N] {
    match width {
        Width::Int4 => unreachable!("4-bit records use integer products"),
        Width::Int8 => dot_groups::<8, N>(terms, x),
        Width::Bf16 => dot_groups::<16, N>(terms, x),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.
fn dot_groups<const BITS: usize, const N: usize>(terms: &[Term<'_>; N], x: &[f32]) -> [f32; N] {
    let (mut lanes, bytes, groups) = ([_mm512_setzero_ps(); N], GROUP / 8 * BITS, x.len() / GROUP);
    for term in terms {
        assert!(term.half.values.len() == groups * bytes && term.next.values.len() == groups * bytes);
    }
    for (number, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
        let x = x.as_chunks::<LANES>().0;
        for i in 0..N {
            // SAFETY: all halves have the groups of `x`.
            let [values, next] = unsafe {
                [terms[i].half, terms[i].next].map(|half| half.values.as_ptr().add(number * bytes))
            };
            prefetch::<BITS>(next);
            let mut sums = _mm512_setzero_ps();
            for j in 0..GROUP / LANES {
                // SAFETY: a group has four times 16 values.
                let values = unsafe { values_of::<BITS>(values.add(j * 2 * BITS)) };
                sums = _mm512_add_ps(sums, _mm512_mul_ps(values, load(&x[j])));
            }
            if BITS < 16 {
                let scale = from_bf16(u16::from_le_bytes(terms[i].half.scales[number]));
                sums = _mm512_mul_ps(_mm512_set1_ps(scale), sums);
            }
            lanes[i] = _mm512_add_ps(lanes[i], sums);
        }
    }
    lanes.map(|lanes| dense::fold(floats(lanes)))
}

/// Adds terms in order to `y`, whose length is a multiple of a group; prefetches the values needed next.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub fn add(width: Width, terms: &[Term<'_>], y: &mut [f32]) {
    match width {
        Width::Int4 => add_terms::<4>(terms, y),
        Width::Int8 => add_terms::<8>(terms, y),
        Width::Bf16 => add_terms::<16>(terms, y),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_terms<const BITS: usize>(terms: &[Term<'_>], y: &mut [f32]) {
    runs!(terms, |_first, run| add_run::<BITS, _>(run, y));
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.
fn add_run<const BITS: usize, const N: usize>(terms: &[Term<'_>; N], y: &mut [f32]) {
    let (bytes, groups) = (GROUP / 8 * BITS, y.len() / GROUP);
    for term in terms {
        assert!(term.half.values.len() == groups * bytes && term.next.values.len() == groups * bytes);
    }
    let codes = load(&std::array::from_fn(|code| (code as i32 - MIDDLE) as f32));
    for first in (0..groups).step_by(SCALES) {
        let mut factors = [[0.0; SCALES]; N];
        for i in 0..N {
            let factor = _mm512_set1_ps(terms[i].factor);
            factors[i] = floats(match BITS {
                16 => factor,
                _ => _mm512_mul_ps(factor, widened(&terms[i].half.scales[first..])),
            });
        }
        for group in first..(first + SCALES).min(groups) {
            let at = group * bytes;
            let y = y[group * GROUP..][..GROUP].as_chunks_mut::<LANES>().0;
            let mut sums = [_mm512_setzero_ps(); GROUP / LANES];
            for j in 0..GROUP / LANES {
                sums[j] = load(&y[j]);
            }
            for i in 0..N {
                // SAFETY: all halves have the groups of `y`.
                let [values, next] =
                    unsafe { [terms[i].half, terms[i].next].map(|half| half.values.as_ptr().add(at)) };
                if BITS > 4 || group % 2 == 0 {
                    prefetch::<BITS>(next);
                }
                let factor = _mm512_set1_ps(factors[i][group - first]);
                if BITS == 4 {
                    let table = _mm512_mul_ps(factor, codes);
                    for j in 0..2 {
                        // SAFETY: a group has 32 bytes.
                        let low = unsafe { words(values.add(j * LANES)) };
                        let high = _mm512_srli_epi32::<4>(low);
                        // An index is the lowest four bits of a word.
                        sums[j] = _mm512_add_ps(sums[j], _mm512_permutexvar_ps(low, table));
                        sums[2 + j] = _mm512_add_ps(sums[2 + j], _mm512_permutexvar_ps(high, table));
                    }
                } else {
                    for j in 0..GROUP / LANES {
                        // SAFETY: a group has four times 16 values.
                        let values = unsafe { values_of::<BITS>(values.add(j * 2 * BITS)) };
                        sums[j] = _mm512_add_ps(sums[j], _mm512_mul_ps(factor, values));
                    }
                }
            }
            for j in 0..GROUP / LANES {
                // SAFETY: 16 floats have 64 bytes.
                unsafe { _mm512_storeu_ps(y[j].as_mut_ptr(), sums[j]) }
            }
        }
    }
}

/// Loads sixteen values of 8 or 16 bits.
///
/// # Safety
/// The values are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values_of<const BITS: usize>(values: *const u8) -> __m512 {
    // SAFETY: sixteen values of 8 bits have 16 bytes, of 16 bits 32.
    unsafe {
        match BITS {
            8 => _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values.cast()))),
            _ => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(values.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
    }
}

/// Loads sixteen bytes as words.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn words(bytes: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 16 readable bytes; the load needs no alignment.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.cast()) })
}

/// Widens up to 16 bf16 values; zeros after the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widened(bits: &[[u8; 2]]) -> __m512 {
    let mask = ((1_u32 << bits.len().min(SCALES)) - 1) as u16;
    // SAFETY: the mask selects the existing values, at most 16.
    let bits = unsafe { _mm256_maskz_loadu_epi16(mask, bits.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load(values: &[f32; LANES]) -> __m512 {
    // SAFETY: 16 floats have 64 bytes.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn floats(register: __m512) -> [f32; LANES] {
    let mut values = [0.0; LANES];
    // SAFETY: 16 floats have 64 bytes.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), register) }
    values
}

/// Prefetches a group's values (for 4 bits, those of two groups) into the second-level cache.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn prefetch<const BITS: usize>(values: *const u8) {
    _mm_prefetch::<_MM_HINT_T1>(values.cast());
    if BITS == 16 {
        _mm_prefetch::<_MM_HINT_T1>(values.wrapping_add(64).cast());
    }
}
