//! The look-up of 16 numbers with AVX-512, which compilers turn into 16 loads: it takes half of their time.

use std::arch::x86_64::*;

use super::BLOCK_ROWS as ROWS;
use super::lists::TABLE;

/// See [`super::lists`].
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn look_up(table: &[f32; TABLE], places: &[i32; ROWS]) -> [f32; ROWS] {
    let mut found = [0.0; ROWS];
    // SAFETY: there are 16 places and numbers, and the mask keeps places within the table.
    unsafe {
        let places = _mm512_loadu_epi32(places.as_ptr());
        let places = _mm512_and_epi32(places, _mm512_set1_epi32(TABLE as i32 - 1));
        _mm512_storeu_ps(
            found.as_mut_ptr(),
            _mm512_i32gather_ps::<4>(places, table.as_ptr()),
        );
    }
    found
}
