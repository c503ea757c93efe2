//! Quantizes a token's activations with AVX-512.

use std::arch::x86_64::*;

use super::load::load_values;
use crate::formats::codebook::bits::LANE;
use crate::gemm::codebook::grid::Grid;

/// Quantizes a token like `tokens::quantize_portable`, with the same bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::gemm::codebook) fn quantize(x: &[f32], bits: u8, codes: &mut [u8]) -> (f32, i32) {
    let zeros = _mm512_setzero_ps();
    let (mut low, mut high, mut odd) = (zeros, zeros, zeros);
    for chunk in x.chunks(LANE) {
        let values = load_part(chunk);
        low = _mm512_min_ps(values, low);
        high = _mm512_max_ps(values, high);
        // Zero unless the value is NaN or infinite.
        odd = _mm512_add_ps(odd, _mm512_mul_ps(values, zeros));
    }
    let finite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(odd, zeros) == u16::MAX;
    let range = (_mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high));
    let Some(grid) = Grid::of(range, finite, bits) else {
        return (f32::NAN, 0);
    };
    let (inverse, shift) = (_mm512_set1_ps(grid.inverse), _mm512_set1_ps(grid.shift));
    let top = _mm512_set1_ps(grid.top);
    for (chunk, codes) in x.chunks(LANE).zip(codes.chunks_mut(LANE)) {
        let scaled = _mm512_add_ps(_mm512_mul_ps(load_part(chunk), inverse), shift);
        let clamped = _mm512_min_ps(_mm512_max_ps(scaled, zeros), top);
        let bytes = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(clamped));
        let mut lanes = [0u8; LANE];
        // SAFETY: the array has the 16 bytes.
        unsafe { _mm_storeu_si128(lanes.as_mut_ptr().cast(), bytes) };
        codes.copy_from_slice(&lanes[..codes.len()]);
    }
    (grid.step, grid.zero)
}

/// Loads up to 16 values, padded with zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_part(values: &[f32]) -> __m512 {
    if let Some(whole) = values.first_chunk() {
        return load_values(whole);
    }
    let mut lanes = [0f32; LANE];
    lanes[..values.len()].copy_from_slice(values);
    load_values(&lanes)
}
