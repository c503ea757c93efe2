//! The products of a piece with AVX2 and AVX-512, which convert or multiply registers directly.

use std::arch::x86_64::*;

use super::products::Bytes;
use crate::formats::coded::{Affine, BLOCK_ROWS, LANES, QUAD, Register};

/// See [`super::products::exact`].
///
/// # Safety
/// The processor has AVX2 and FMA; there are four activations per register.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn exact_avx2(codes: &[Register], x: &[f32], sums: &mut [f32; LANES]) {
    const PARTS: usize = LANES / 8;
    let mut parts = [_mm256_setzero_ps(); PARTS];
    for (i, part) in parts.iter_mut().enumerate() {
        // SAFETY: there are 64 sums.
        *part = unsafe { _mm256_loadu_ps(sums.as_ptr().add(8 * i)) };
    }
    for (quad, codes) in codes.iter().enumerate() {
        // SAFETY: the caller guarantees the activations; a register has 64 bytes.
        unsafe {
            let x = _mm_loadu_ps(x.as_ptr().add(QUAD * quad));
            let x = _mm256_set_m128(x, x);
            for (i, part) in parts.iter_mut().enumerate() {
                let bytes = _mm_loadl_epi64(codes.0.as_ptr().add(8 * i).cast());
                *part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), x, *part);
            }
        }
    }
    for (i, &part) in parts.iter().enumerate() {
        // SAFETY: there are 64 sums.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr().add(8 * i), part) }
    }
}

/// See [`super::products::exact`]. Even and odd registers have separate sums, to shorten dependency chains.
///
/// # Safety
/// The processor has AVX-512 F; there are four activations per register.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn exact_avx512(codes: &[Register], x: &[f32], sums: &mut [f32; LANES]) {
    const PARTS: usize = LANES / 16;
    let mut parts = [[_mm512_setzero_ps(); PARTS]; 2];
    for (i, part) in parts[0].iter_mut().enumerate() {
        // SAFETY: there are 64 sums.
        *part = unsafe { _mm512_loadu_ps(sums.as_ptr().add(16 * i)) };
    }
    for (quad, codes) in codes.iter().enumerate() {
        // SAFETY: the caller guarantees the activations; a register has 64 bytes.
        unsafe {
            let x = _mm512_broadcast_f32x4(_mm_loadu_ps(x.as_ptr().add(QUAD * quad)));
            for (i, part) in parts[quad % 2].iter_mut().enumerate() {
                let bytes = _mm_loadu_si128(codes.0.as_ptr().add(16 * i).cast());
                *part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), x, *part);
            }
        }
    }
    let [even, odd] = parts;
    for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
        // SAFETY: there are 64 sums.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(16 * i), _mm512_add_ps(even, odd)) }
    }
}

/// See [`super::products::add_bytes`]. Two products of bytes, summed over `RUN` registers, fit 16 bits: for bytes below
/// 128 in one register (2 * 127 * 127 is 32,258), below 64 over two, below 32 over four. Registers are read once for
/// all tokens.
///
/// # Safety
/// The processor has AVX2; each token has four activations per register.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_bytes_avx2<const N: usize, const RUN: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    let mut sums = [[_mm256_setzero_si256(); 2]; N];
    let mut place = 0;
    let mut add = |run: &[Register]| {
        let mut words = [[_mm256_setzero_si256(); 2]; N];
        for symbols in run {
            for (words, x) in words.iter_mut().zip(&x) {
                // SAFETY: the caller guarantees the activations; this register's four follow those of the previous
                // registers.
                let products = unsafe { words_avx2(symbols, x.bytes.as_ptr().add(place)) };
                *words = [0, 1].map(|half| _mm256_add_epi16(words[half], products[half]));
            }
            place += QUAD;
        }
        for (sums, words) in sums.iter_mut().zip(words) {
            for (sum, words) in sums.iter_mut().zip(words) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
            }
        }
    };
    let (runs, last) = symbols.as_chunks::<RUN>();
    runs.iter().for_each(|run| add(run));
    add(last);
    let factor = _mm256_set1_epi32(affine.factor);
    for ((rows, sums), x) in rows.iter_mut().zip(sums).zip(&x) {
        let (unit, offset) = (_mm256_set1_ps(x.unit), _mm256_set1_epi32(affine.offset * x.sum));
        for (half, sum) in sums.into_iter().enumerate() {
            let codes = _mm256_add_epi32(_mm256_mullo_epi32(sum, factor), offset);
            let values = _mm256_mul_ps(unit, _mm256_cvtepi32_ps(codes));
            // SAFETY: there are 16 rows.
            unsafe {
                let rows = rows.as_mut_ptr().add(8 * half);
                _mm256_storeu_ps(rows, _mm256_add_ps(_mm256_loadu_ps(rows), values));
            }
        }
    }
}

/// The products of a register by four bytes, added in pairs.
///
/// # Safety
/// The processor has AVX2; four bytes at `x` are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn words_avx2(symbols: &Register, x: *const i8) -> [__m256i; 2] {
    // SAFETY: the caller guarantees the activations; a register has 64 bytes and is aligned.
    unsafe {
        let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        let symbols = symbols.0.as_ptr().cast::<__m256i>();
        [symbols, symbols.add(1)].map(|half| _mm256_maddubs_epi16(_mm256_load_si256(half), x))
    }
}

/// See [`super::products::add_bytes`]. A token alone has four sums, which hide the latency of dot products; several
/// have two each.
///
/// # Safety
/// The processor has AVX-512 with VNNI; each token has four activations per register.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn add_bytes_avx512<const N: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match N {
            1 => add_runs_avx512::<N, 4>(symbols, affine, x, rows),
            _ => add_runs_avx512::<N, 2>(symbols, affine, x, rows),
        }
    }
}

/// See [`add_bytes_avx512`]; each token has `RUN` sums.
///
/// # Safety
/// As for [`add_bytes_avx512`].
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_runs_avx512<const N: usize, const RUN: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    let mut sums = [[_mm512_setzero_si512(); RUN]; N];
    let mut place = 0;
    let mut add = |run: &[Register]| {
        for (number, symbols) in run.iter().enumerate() {
            for (sums, x) in sums.iter_mut().zip(&x) {
                // SAFETY: the caller guarantees the activations; this register's four follow those of the previous
                // registers. A register has 64 bytes and is aligned.
                unsafe {
                    let x = x.bytes.as_ptr().add(place).cast::<i32>().read_unaligned();
                    let symbols = _mm512_load_si512(symbols.0.as_ptr().cast());
                    sums[number] = _mm512_dpbusd_epi32(sums[number], symbols, _mm512_set1_epi32(x));
                }
            }
            place += QUAD;
        }
    };
    let (runs, last) = symbols.as_chunks::<RUN>();
    runs.iter().for_each(|run| add(run));
    add(last);
    let factor = _mm512_set1_epi32(affine.factor);
    for ((rows, sums), x) in rows.iter_mut().zip(sums).zip(&x) {
        let sum = sums
            .into_iter()
            .fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi32(a, b));
        let offset = _mm512_set1_epi32(affine.offset * x.sum);
        let codes = _mm512_add_epi32(_mm512_mullo_epi32(sum, factor), offset);
        let values = _mm512_mul_ps(_mm512_set1_ps(x.unit), _mm512_cvtepi32_ps(codes));
        // SAFETY: there are 16 rows.
        unsafe {
            _mm512_storeu_ps(
                rows.as_mut_ptr(),
                _mm512_add_ps(_mm512_loadu_ps(rows.as_ptr()), values),
            )
        }
    }
}
