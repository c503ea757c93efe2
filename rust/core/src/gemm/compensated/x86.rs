//! The inner loops with AVX2: a plane of eight values is a register, and a chunk is eight registers.
//!
//! 512-bit registers would not help: a compensator of rank 32 is a hundredth of its matrix, and unpacking three-bit
//! codes is bound by shifts, which are equally frequent in both widths. This module avoids generic functions of the
//! standard library that take closures: they are compiled without AVX2 and would call the closure once per register.

use std::arch::x86_64::*;

use super::TOGETHER;
use super::scalar::Coefficients;
use crate::formats::compensated::FactorRow;
use crate::formats::compensated::chunk::{CHUNK, LANES, Width};

type Registers = [__m256; CHUNK / LANES];

/// Widens eight bytes to integers.
#[inline]
#[target_feature(enable = "avx2")]
fn widen(bytes: &[u8]) -> __m256i {
    let bytes: [u8; LANES] = bytes[..LANES].try_into().unwrap_or_default();
    _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)))
}

/// Codes minus their middle.
#[inline]
#[target_feature(enable = "avx2")]
fn centred(codes: __m256i, middle: i32) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(middle)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn three(bytes: &[u8]) -> Registers {
    let seven = _mm256_set1_epi32(7);
    let four = _mm256_set1_epi32(4);
    let [a, b, c] = [widen(bytes), widen(&bytes[LANES..]), widen(&bytes[2 * LANES..])];
    let c6 = _mm256_or_si256(
        _mm256_srli_epi32::<6>(a),
        _mm256_and_si256(_mm256_srli_epi32::<4>(c), four),
    );
    let c7 = _mm256_or_si256(
        _mm256_srli_epi32::<6>(b),
        _mm256_and_si256(_mm256_srli_epi32::<5>(c), four),
    );
    [
        centred(_mm256_and_si256(a, seven), 4),
        centred(_mm256_and_si256(_mm256_srli_epi32::<3>(a), seven), 4),
        centred(_mm256_and_si256(b, seven), 4),
        centred(_mm256_and_si256(_mm256_srli_epi32::<3>(b), seven), 4),
        centred(_mm256_and_si256(c, seven), 4),
        centred(_mm256_and_si256(_mm256_srli_epi32::<3>(c), seven), 4),
        centred(c6, 4),
        centred(c7, 4),
    ]
}

/// Widens f16 values like [`crate::formats::compensated::chunk`]: finite values exactly.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(bytes: &[u8]) -> __m256 {
    let bytes: [u8; 2 * LANES] = bytes[..2 * LANES].try_into().unwrap_or_default();
    // SAFETY: the array has sixteen bytes, and the load needs no alignment.
    let bits = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
    let magnitude = _mm256_slli_epi32::<13>(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)));
    let scaled = _mm256_mul_ps(
        _mm256_castsi256_ps(magnitude),
        _mm256_set1_ps(f32::from_bits(0x7780_0000)),
    );
    let sign = _mm256_slli_epi32::<16>(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)));
    _mm256_or_ps(scaled, _mm256_castsi256_ps(sign))
}

#[inline]
#[target_feature(enable = "avx2")]
fn unpack(width: Width, bytes: &[u8]) -> Registers {
    let mut values = [_mm256_setzero_ps(); CHUNK / LANES];
    match width {
        Width::Three => return three(bytes),
        Width::Eight => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<LANES>().0) {
                *value = centred(widen(bytes), 128);
            }
        }
        Width::Half => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<{ 2 * LANES }>().0) {
                *value = halves(bytes);
            }
        }
    }
    values
}

/// Loads eight values of a slice.
#[inline]
#[target_feature(enable = "avx2")]
fn load(values: &[f32; LANES]) -> __m256 {
    // SAFETY: the array has eight values, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(values: __m256) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: the array has eight values, and the store needs no alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
    out
}

/// Computes z[t] = row . x[t]; x holds whole chunks of each token.
#[target_feature(enable = "avx2")]
pub fn project(row: &FactorRow, x: &[f32], z: &mut [f32]) {
    let width = x.len() / z.len();
    let tokens = x.chunks_exact(width);
    let (mut x, mut z) = (tokens, z);
    while z.len() >= TOGETHER {
        let (head, rest) = z.split_at_mut(TOGETHER);
        z = rest;
        project_tokens::<TOGETHER>(row, std::array::from_fn(|_| x.next().unwrap_or_default()), head);
    }
    for (z, x) in z.chunks_mut(1).zip(x) {
        project_tokens::<1>(row, [x], z);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn project_tokens<const N: usize>(row: &FactorRow, x: [&[f32]; N], z: &mut [f32]) {
    let x = x.map(|x| x.as_chunks::<LANES>().0);
    let mut sums = [_mm256_setzero_ps(); N];
    for chunk in 0..x[0].len() / (CHUNK / LANES) {
        let values = unpack(row.width(), row.bytes(chunk));
        let scale = _mm256_set1_ps(row.finite_scale(chunk));
        for (sum, x) in sums.iter_mut().zip(&x) {
            let mut part = _mm256_setzero_ps();
            for (value, x) in values.iter().zip(&x[chunk * (CHUNK / LANES)..]) {
                part = _mm256_add_ps(part, _mm256_mul_ps(*value, load(x)));
            }
            *sum = _mm256_add_ps(*sum, _mm256_mul_ps(scale, part));
        }
    }
    for (z, sum) in z.iter_mut().zip(sums) {
        let s = store(sum);
        *z = (s[0] + s[4]) + (s[1] + s[5]) + ((s[2] + s[6]) + (s[3] + s[7]));
    }
}

/// Computes y[t] += sum over ranks of z[k][t] * row k, starting at chunk `first_chunk`; y is tokens x columns of
/// equal length.
#[target_feature(enable = "avx2")]
pub fn expand<'a>(
    left: &impl Fn(usize) -> FactorRow<'a>,
    coefficients: Coefficients,
    tokens: usize,
    first_chunk: usize,
    y: &mut [f32],
) {
    let columns = y.len() / tokens;
    let rows: Vec<FactorRow> = (0..coefficients.ranks).map(left).collect();
    let mut unpacked = Vec::with_capacity(rows.len());
    for chunk in 0..columns.div_ceil(CHUNK) {
        // All tokens share the unpacked values of a chunk, which stay in the first-level cache.
        unpacked.clear();
        for row in &rows {
            let (at, width) = (first_chunk + chunk, row.width());
            unpacked.push((row.finite_scale(at), unpack(width, row.bytes(at))));
        }
        for (token, y) in y.chunks_exact_mut(columns).enumerate() {
            let z = &coefficients.z[coefficients.first + token..];
            add_chunk(&unpacked, z, coefficients.stride, &mut y[chunk * CHUNK..]);
        }
    }
}

/// Computes y += sum over ranks of z[k] times the values of rank k, for up to a chunk of columns; `z` has stride
/// `stride`.
#[inline]
#[target_feature(enable = "avx2")]
fn add_chunk(unpacked: &[(f32, Registers)], z: &[f32], stride: usize, y: &mut [f32]) {
    let mut sums = [_mm256_setzero_ps(); CHUNK / LANES];
    for (index, (scale, values)) in unpacked.iter().enumerate() {
        let factor = _mm256_set1_ps(scale * z[index * stride]);
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = _mm256_add_ps(*sum, _mm256_mul_ps(factor, *value));
        }
    }
    for (y, sum) in y.chunks_mut(LANES).zip(sums) {
        for (y, sum) in y.iter_mut().zip(store(sum)) {
            *y += sum;
        }
    }
}
