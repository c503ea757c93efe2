//! The look-up of 16 numbers with AVX-512, which compilers turn into 16 loads: it takes half of their time.

use std::arch::x86_64::*;

use super::BLOCK_ROWS as ROWS;
use crate::simd::{Isa, Kind};

/// The numbers of a table at some places, modulo its size, which is a power of two; `None` without AVX-512.
#[inline(always)]
pub(super) fn look_up<const SIZE: usize>(
    isa: Isa,
    table: &[f32; SIZE],
    places: &[i32; ROWS],
) -> Option<[f32; ROWS]> {
    const { assert!(SIZE.is_power_of_two() && SIZE <= 1 << 30) }
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX-512 F.
        Kind::Avx512 | Kind::Amx => Some(unsafe { gathered(table, places) }),
        _ => None,
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn gathered<const SIZE: usize>(table: &[f32; SIZE], places: &[i32; ROWS]) -> [f32; ROWS] {
    let mut found = [0.0; ROWS];
    // SAFETY: there are 16 places and numbers, and the mask keeps places within the table, whose size is a power of two.
    unsafe {
        let places = _mm512_loadu_epi32(places.as_ptr());
        let places = _mm512_and_epi32(places, _mm512_set1_epi32(SIZE as i32 - 1));
        _mm512_storeu_ps(
            found.as_mut_ptr(),
            _mm512_i32gather_ps::<4>(places, table.as_ptr()),
        );
    }
    found
}
