//! The operations of the integer kernels on registers of two rows, with AVX2.

use std::arch::x86_64::*;

use crate::gemm::codebook::lanes::{AT_ONCE, Lanes};

/// The vector instructions of AVX2.
pub(in crate::gemm::codebook) struct Avx2;

impl Lanes for Avx2 {
    const HALVES: usize = 2;
    const WIDEST: usize = 2;
    const BESIDE: usize = 2;
    const MOST: usize = 2;
    type Int = __m256i;
    /// The low and the high four bits of activations: pairs of products of eight bits each would saturate.
    type X = [__m256i; 2];

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn zero() -> __m256i {
        _mm256_setzero_si256()
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: the caller guarantees 32 readable bytes at `from`.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn tables<const BITS: u8>(centroids: *const u8) -> __m256i {
        // SAFETY: the caller guarantees the bytes of two rows, 32 or 16, at `centroids`.
        unsafe {
            if BITS == 4 {
                return _mm256_loadu_si256(centroids.cast());
            }
            let two = _mm256_castsi128_si256(_mm_loadu_si128(centroids.cast()));
            _mm256_permute4x64_epi64::<0b01_01_00_00>(two)
        }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(bytes: __m256i, to: *mut u8) {
        // SAFETY: the caller guarantees 32 writable bytes at `to`.
        unsafe { _mm256_storeu_si256(to.cast(), bytes) }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mask(bytes: __m256i, mask: u8) -> __m256i {
        _mm256_and_si256(bytes, _mm256_set1_epi8(mask as i8))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn shift(words: __m256i, count: i32) -> __m256i {
        _mm256_srl_epi16(words, _mm_cvtsi32_si128(count))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn blend(low: __m256i, high: __m256i, mask: u8) -> __m256i {
        let mask = _mm256_set1_epi8(mask as i8);
        _mm256_or_si256(_mm256_and_si256(mask, low), _mm256_andnot_si256(mask, high))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn look_up(table: __m256i, index: __m256i) -> __m256i {
        _mm256_shuffle_epi8(table, index)
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn interleave(even: __m256i, odd: __m256i) -> [__m256i; 2] {
        [_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)]
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transposed([a, b, c, d]: [__m256i; AT_ONCE]) -> [__m256i; AT_ONCE] {
        let (ab, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
    unsafe fn line(_: *const u8, _: *const u8) -> [__m256i; AT_ONCE] {
        unreachable!("2-bit codes look up activations")
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn activations(from: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller guarantees 16 readable bytes at `from`, and AVX2.
        unsafe {
            let x = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
            [Self::mask(x, 15), Self::mask(Self::shift(x, 4), 15)]
        }
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot(sums: __m256i, weights: __m256i, [low, high]: [__m256i; 2]) -> __m256i {
        // The sum of two products is at most 2 * 15 * 128 in magnitude, far from saturation at 32767.
        let low = _mm256_madd_epi16(_mm256_maddubs_epi16(low, weights), _mm256_set1_epi16(1));
        let high = _mm256_madd_epi16(_mm256_maddubs_epi16(high, weights), _mm256_set1_epi16(16));
        _mm256_add_epi32(sums, _mm256_add_epi32(low, high))
    }
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn row_sums([a, b, c, d]: [__m256i; AT_ONCE], to: *mut i32) {
        // SAFETY: the caller guarantees eight writable numbers at `to`.
        unsafe {
            // The low half holds the sums of the even rows, the high half those of the odd ones.
            let all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(to.cast(), _mm256_permutevar8x32_epi32(all, order));
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
