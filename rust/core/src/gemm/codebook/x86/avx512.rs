//! The operations of the integer kernels on registers of four rows, with AVX-512 and VNNI.

use std::arch::x86_64::*;

use crate::gemm::codebook::lanes::{AT_ONCE, Lanes};
use crate::gemm::codebook::planes::lines;

/// The vector instructions of AVX-512.
pub(in crate::gemm::codebook) struct Avx512;

impl Lanes for Avx512 {
    const HALVES: usize = 1;
    const WIDEST: usize = 4;
    const BESIDE: usize = 5;
    const MOST: usize = 6;
    type Int = __m512i;
    type X = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn zero() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller guarantees 64 readable bytes at `from`.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn tables<const BITS: u8>(centroids: *const u8) -> __m512i {
        // SAFETY: the caller guarantees the bytes of four rows, 64 or 32, at `centroids`.
        unsafe {
            if BITS == 4 {
                return _mm512_loadu_si512(centroids.cast());
            }
            let four = _mm512_castsi256_si512(_mm256_loadu_si256(centroids.cast()));
            _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), four)
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn store(bytes: __m512i, to: *mut u8) {
        // SAFETY: the caller guarantees 64 writable bytes at `to`.
        unsafe { _mm512_storeu_si512(to.cast(), bytes) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn mask(bytes: __m512i, mask: u8) -> __m512i {
        _mm512_and_si512(bytes, _mm512_set1_epi8(mask as i8))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn shift(words: __m512i, count: i32) -> __m512i {
        _mm512_srl_epi16(words, _mm_cvtsi32_si128(count))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn blend(low: __m512i, high: __m512i, mask: u8) -> __m512i {
        _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(mask as i8), low, high)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn look_up(table: __m512i, index: __m512i) -> __m512i {
        _mm512_shuffle_epi8(table, index)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn interleave(even: __m512i, odd: __m512i) -> [__m512i; 2] {
        [_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd)]
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn transposed([a, b, c, d]: [__m512i; AT_ONCE]) -> [__m512i; AT_ONCE] {
        let (ab, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn line(line: *const u8, centroids: *const u8) -> [__m512i; AT_ONCE] {
        // SAFETY: the caller guarantees 64 readable bytes at both addresses.
        unsafe { Self::transposed(lines::centroids(line, centroids)) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn activations(from: *const u8) -> __m512i {
        // SAFETY: the caller guarantees 16 readable bytes at `from`.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dot(sums: __m512i, weights: __m512i, x: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sums, x, weights)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn row_sums([a, b, c, d]: [__m512i; AT_ONCE], to: *mut i32) {
        // SAFETY: the caller guarantees 16 writable numbers at `to`.
        unsafe {
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            // Lane l now holds the sums of row l of each quad.
            let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi32(order, all));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
