//! The vectors of the kernels for several tokens: 4, 8 and 16 single-precision lanes.

use std::arch::x86_64::*;

/// A register of floats.
///
/// # Safety
/// Every function needs AVX2 and FMA; those of `__m512` also need AVX-512 F. Pointers are valid for the lanes that
/// the function reads or writes; they need no alignment.
pub(super) trait Vector: Copy {
    /// The number of floats.
    const LANES: usize;
    /// Zeros in all lanes.
    unsafe fn zero() -> Self;
    /// A float in all lanes.
    unsafe fn splat(value: f32) -> Self;
    /// Loads `LANES` floats.
    unsafe fn load(from: *const f32) -> Self;
    /// Stores `LANES` floats.
    unsafe fn store(self, to: *mut f32);
    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self + a * b` with one rounding.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
}

macro_rules! vector {
    ($type:ty, $lanes:literal, $features:literal, $zero:ident, $splat:ident, $load:ident, $store:ident, $add:ident,
        $fma:ident) => {
        impl Vector for $type {
            const LANES: usize = $lanes;
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn zero() -> Self {
                $zero()
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn splat(value: f32) -> Self {
                $splat(value)
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the caller guarantees `LANES` readable floats at `from`; the load needs no alignment.
                unsafe { $load(from) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: the caller guarantees `LANES` writable floats at `to`; the store needs no alignment.
                unsafe { $store(to, self) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add(self, other: Self) -> Self {
                $add(self, other)
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add_product(self, a: Self, b: Self) -> Self {
                $fma(a, b, self)
            }
        }
    };
}

vector!(
    __m128,
    4,
    "fma",
    _mm_setzero_ps,
    _mm_set1_ps,
    _mm_loadu_ps,
    _mm_storeu_ps,
    _mm_add_ps,
    _mm_fmadd_ps
);
vector!(
    __m256,
    8,
    "fma",
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps
);
vector!(
    __m512,
    16,
    "avx512f",
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps
);
