//! Loads of whole lanes.

use std::arch::x86_64::*;

use crate::formats::codebook::bits::LANE;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_lane(bytes: &[u8; LANE]) -> __m128i {
    // SAFETY: the array has the 16 bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_values(values: &[f32; LANE]) -> __m512 {
    // SAFETY: the array has the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}
