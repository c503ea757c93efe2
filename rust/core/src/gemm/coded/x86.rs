//! The products of a piece with AVX2 and AVX-512, which multiply registers directly.

use std::arch::x86_64::*;

use super::prepared::Bytes;
use crate::formats::coded::{Affine, BLOCK_ROWS, QUAD, Register};

/// See [`super::products::add`]. Two products of bytes, summed over `RUN` registers, fit 16 bits: for symbols below
/// 128 in one register (2 * 127 * 128 is 32,512), below 64 over two, below 32 over four. Registers are read once for
/// all tokens.
///
/// # Safety
/// The processor has AVX2; each plane has four activations per register.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_avx2<const N: usize, const P: usize, const RUN: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes<P>; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    let mut sums = [[[_mm256_setzero_si256(); 2]; P]; N];
    let mut place = 0;
    let mut add = |run: &[Register]| {
        let mut words = [[[_mm256_setzero_si256(); 2]; P]; N];
        for symbols in run {
            for (words, x) in words.iter_mut().zip(&x) {
                for (words, plane) in words.iter_mut().zip(&x.planes) {
                    // SAFETY: the caller guarantees the activations; this register's four follow those of the
                    // previous registers.
                    let products = unsafe { words_avx2(symbols, plane.as_ptr().add(place)) };
                    *words = [0, 1].map(|half| _mm256_add_epi16(words[half], products[half]));
                }
            }
            place += QUAD;
        }
        for (sum, words) in sums.as_flattened_mut().iter_mut().zip(words.as_flattened()) {
            *sum = [0, 1].map(|half| {
                _mm256_add_epi32(sum[half], _mm256_madd_epi16(words[half], _mm256_set1_epi16(1)))
            });
        }
    };
    let (runs, last) = symbols.as_chunks::<RUN>();
    runs.iter().for_each(|run| add(run));
    add(last);
    let factor = _mm256_set1_epi32(affine.factor);
    for ((rows, sums), x) in rows.iter_mut().zip(&sums).zip(&x) {
        let totals = [0, 1].map(|half| {
            let plane = |plane: usize| {
                let offset = _mm256_set1_epi32(affine.offset * x.sums[plane]);
                _mm256_add_epi32(_mm256_mullo_epi32(sums[plane][half], factor), offset)
            };
            match P {
                1 => _mm256_cvtepi32_ps(plane(0)),
                _ => {
                    let upper = _mm256_add_epi32(_mm256_slli_epi32::<8>(plane(0)), plane(1));
                    let upper = _mm256_mul_ps(_mm256_cvtepi32_ps(upper), _mm256_set1_ps(256.0));
                    _mm256_add_ps(upper, _mm256_cvtepi32_ps(plane(2)))
                }
            }
        });
        for (half, total) in totals.into_iter().enumerate() {
            let values = _mm256_mul_ps(_mm256_set1_ps(x.scale), total);
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

/// See [`super::products::add`]. A plane has several sums, because few would wait for each other's dot products.
///
/// # Safety
/// The processor has AVX-512 with VNNI; each plane has four activations per register.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn add_avx512<const N: usize, const P: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes<P>; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match N * P {
            1 => add_runs_avx512::<N, P, 4>(symbols, affine, x, rows),
            _ => add_runs_avx512::<N, P, 2>(symbols, affine, x, rows),
        }
    }
}

/// See [`add_avx512`]; each plane has `RUN` sums.
///
/// # Safety
/// As for [`add_avx512`].
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_runs_avx512<const N: usize, const P: usize, const RUN: usize>(
    symbols: &[Register],
    affine: Affine,
    x: [Bytes<P>; N],
    rows: &mut [[f32; BLOCK_ROWS]; N],
) {
    let mut sums = [[[_mm512_setzero_si512(); RUN]; P]; N];
    let mut place = 0;
    let mut add = |run: &[Register]| {
        for (number, symbols) in run.iter().enumerate() {
            for (sums, x) in sums.iter_mut().zip(&x) {
                for (sums, plane) in sums.iter_mut().zip(&x.planes) {
                    // SAFETY: the caller guarantees the activations; this register's four follow those of the
                    // previous registers. A register has 64 bytes and is aligned.
                    unsafe {
                        let x = plane.as_ptr().add(place).cast::<i32>().read_unaligned();
                        let symbols = _mm512_load_si512(symbols.0.as_ptr().cast());
                        sums[number] = _mm512_dpbusd_epi32(sums[number], symbols, _mm512_set1_epi32(x));
                    }
                }
            }
            place += QUAD;
        }
    };
    let (runs, last) = symbols.as_chunks::<RUN>();
    runs.iter().for_each(|run| add(run));
    add(last);
    let factor = _mm512_set1_epi32(affine.factor);
    for ((rows, sums), x) in rows.iter_mut().zip(&sums).zip(&x) {
        let plane = |plane: usize| {
            let sums = sums[plane].iter();
            let sum = sums.fold(_mm512_setzero_si512(), |a, &b| _mm512_add_epi32(a, b));
            let offset = _mm512_set1_epi32(affine.offset * x.sums[plane]);
            _mm512_add_epi32(_mm512_mullo_epi32(sum, factor), offset)
        };
        let total = match P {
            1 => _mm512_cvtepi32_ps(plane(0)),
            _ => {
                let upper = _mm512_add_epi32(_mm512_slli_epi32::<8>(plane(0)), plane(1));
                let upper = _mm512_mul_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(256.0));
                _mm512_add_ps(upper, _mm512_cvtepi32_ps(plane(2)))
            }
        };
        let values = _mm512_mul_ps(_mm512_set1_ps(x.scale), total);
        // SAFETY: there are 16 rows.
        unsafe {
            _mm512_storeu_ps(
                rows.as_mut_ptr(),
                _mm512_add_ps(_mm512_loadu_ps(rows.as_ptr()), values),
            )
        }
    }
}
