//! Kernels for x86-64.
//!
//! AVX-512, integers: a register of codes becomes registers of 4 rows x 16 columns of centroids by one byte shuffle
//! each (the lane's table is the row's codebook), and `vpdpbusd` multiplies them by 16 activations that all lanes share.
//! Few tokens do so straight from the codes; more tokens share the look-up through a panel of bytes in the cache.
//! AVX-512, floating point: 16 codes of a row are widened to lanes and permute the row's 16 values.
//! AVX2: the portable kernel with byte shuffles and permutations for look-ups.
//!
//! Loops index arrays on purpose: a closure that an iterator or `array::map` calls is compiled outside the function that
//! enables the instructions, and each intrinsic in it becomes a call (measured: ten times slower).

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::drive::Unit;
use super::portable::{self, Lookup};
use crate::codebook::bits::{LANE, QUADS, REGISTER, step_columns};

mod exact;
mod integer;
mod quantize;

pub(super) use quantize::quantize;

/// How far ahead of the codes in use the next ones are asked for. 1 to 2 KB is best; 4 KB hurts.
const AHEAD: usize = 1024;

/// A register in memory.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; REGISTER]);

/// A panel's centroids as bytes: for each group of 16 columns, four registers of 4 rows.
#[derive(Default)]
pub(crate) struct Buffers {
    planes: [Vec<[Line; QUADS]>; 2],
}

const fn groups(bits: u8) -> usize {
    step_columns(bits) / LANE
}

/// Byte shuffles and permutations of AVX2.
struct Shuffles;

impl Lookup for Shuffles {
    #[inline(always)]
    fn bytes(codes: &[u8], table: &[u8; LANE], out: &mut [i8]) {
        for (codes, out) in codes
            .as_chunks::<LANE>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<LANE>().0)
        {
            // SAFETY: only `panel_avx2` names this type, whose caller has AVX2; both arrays have the 16 bytes.
            unsafe {
                let table = _mm_loadu_si128(table.as_ptr().cast());
                let codes = _mm_loadu_si128(codes.as_ptr().cast());
                _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_shuffle_epi8(table, codes));
            }
        }
    }

    #[inline(always)]
    fn values(codes: &[u8], table: &[f32; LANE], out: &mut [f32]) {
        for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
            // SAFETY: as above; the halves of the table, the codes and the output have 8 elements each.
            unsafe {
                let low = _mm256_loadu_ps(table.as_ptr());
                let high = _mm256_loadu_ps(table.as_ptr().add(8));
                let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.as_ptr().cast()));
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                let values = _mm256_blendv_ps(
                    _mm256_permutevar8x32_ps(low, codes),
                    _mm256_permutevar8x32_ps(high, codes),
                    upper,
                );
                _mm256_storeu_ps(out.as_mut_ptr(), values);
            }
        }
    }
}

/// Computes a panel with AVX2, which must be available.
pub(super) fn panel_avx2(unit: &Unit, panel: usize, buffers: &mut portable::Buffers, out: &mut [f32]) {
    #[target_feature(enable = "avx2,fma")]
    fn inner(unit: &Unit, panel: usize, buffers: &mut portable::Buffers, out: &mut [f32]) {
        portable::panel::<Shuffles>(unit, panel, buffers, out);
    }
    // SAFETY: `isa.require()` in `matmul_grouped` proved that the processor runs AVX2 and FMA.
    unsafe { inner(unit, panel, buffers, out) }
}

/// Computes a panel with AVX-512, which must be available; `out` is tokens x 16 rows of zeros.
pub(super) fn panel_avx512(unit: &Unit, panel: usize, buffers: &mut Buffers, out: &mut [f32]) {
    // SAFETY: `isa.require()` in `matmul_grouped` proved that the processor runs every feature that `blocks` enables.
    unsafe {
        match unit.view.layout().bits() {
            2 => blocks::<2>(unit, panel, buffers, out),
            3 => blocks::<3>(unit, panel, buffers, out),
            _ => blocks::<4>(unit, panel, buffers, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn blocks<const BITS: u8>(unit: &Unit, panel: usize, buffers: &mut Buffers, out: &mut [f32]) {
    let layout = unit.view.layout();
    for index in 0..layout.blocks() {
        let block = unit.view.block(unit.expert, panel, index);
        let first = index * layout.block_size();
        match unit.mode.planes() {
            _ if unit.mode.activation_bits().is_none() => exact::exact::<BITS>(unit, &block, first, out),
            1 => integer::integer::<BITS, 1>(unit, &block, first, buffers, out),
            _ => integer::integer::<BITS, 2>(unit, &block, first, buffers, out),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; REGISTER]) -> __m512i {
    // SAFETY: the array has the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_lane(bytes: &[u8; LANE]) -> __m128i {
    // SAFETY: the array has the 16 bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_values(values: &[f32; LANE]) -> __m512 {
    // SAFETY: the array has the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

/// Asks for the bytes some way behind `at`, of which nothing is read.
#[inline(always)]
fn prefetch(at: &[u8; REGISTER]) {
    // SAFETY: a prefetch of any address is allowed and cannot fault.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.as_ptr().wrapping_add(AHEAD).cast()) }
}
