//! The part of a row block that decoding a panel reads.

use std::ops::Range;

use crate::bits::UNIT;
use crate::formats::groupwise::{Layout, ParameterType, REGISTER_BYTES};
use crate::gemm::panel::LANES;

/// The quads (four columns of each row) of a unit.
pub(super) const QUADS: usize = UNIT / 4;

/// Some units (32 columns: a chunk of bf16) of a block.
pub(super) struct Part<'a> {
    pub block: &'a [u8],
    pub layout: &'a Layout,
    pub units: Range<usize>,
}

impl Part<'_> {
    /// The group of a column; for columns after the last, the last group.
    #[inline(always)]
    pub fn group(&self, column: usize) -> usize {
        let shift = match self.layout.spec().group {
            0 => usize::BITS - 1,
            group => group.trailing_zeros(),
        };
        (column >> shift).min(self.layout.groups().saturating_sub(1))
    }

    /// The registers of a unit.
    #[inline(always)]
    pub fn registers(&self, unit: usize) -> &[[u8; REGISTER_BYTES]] {
        let bytes = &self.block[self.layout.unit_at(unit)..][..self.layout.bits() * REGISTER_BYTES];
        bytes.as_chunks().0
    }

    /// The bytes of a group's parameters.
    fn group_bytes(&self) -> usize {
        2 * LANES * (2 - usize::from(self.layout.spec().symmetric))
    }

    /// The value that a symmetric tensor subtracts from its codes.
    fn middle(&self) -> f32 {
        (1u32 << (self.layout.bits() - 1)) as f32
    }

    /// The scales and offsets of a group.
    #[inline(always)]
    pub fn parameters(&self, group: usize) -> [[f32; LANES]; 2] {
        let spec = self.layout.spec();
        let bytes = &self.block[self.layout.parameters_at(group)..][..self.group_bytes()];
        let read = |at: usize| {
            let bits: [u16; LANES] =
                std::array::from_fn(|i| u16::from_le_bytes([bytes[at + 2 * i], bytes[at + 2 * i + 1]]));
            match spec.parameters {
                ParameterType::Bf16 => bits.map(|bits| f32::from_bits(u32::from(bits) << 16)),
                ParameterType::F16 => bits.map(|bits| half::f16::from_bits(bits).to_f32()),
            }
        };
        let scales = read(0);
        match spec.symmetric {
            true => [scales, scales.map(|scale| -self.middle() * scale)],
            false => [scales, read(2 * LANES)],
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    impl Part<'_> {
        /// The scales, and the offsets minus `middle` times the scales, of a group.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
        pub fn vectors(&self, group: usize, middle: f32) -> (__m512, __m512) {
            let spec = self.layout.spec();
            let bytes = &self.block[self.layout.parameters_at(group)..][..self.group_bytes()];
            let read = |half: usize| {
                // SAFETY: the slice of 16 parameters has 32 bytes.
                let bits =
                    unsafe { _mm256_loadu_si256(bytes[2 * LANES * half..][..2 * LANES].as_ptr().cast()) };
                match spec.parameters {
                    ParameterType::Bf16 => {
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
                    }
                    ParameterType::F16 => _mm512_cvtph_ps(bits),
                }
            };
            let scales = read(0);
            let offsets = match spec.symmetric {
                true => _mm512_mul_ps(scales, _mm512_set1_ps(-middle - self.middle())),
                false => _mm512_fnmadd_ps(scales, _mm512_set1_ps(middle), read(1)),
            };
            (scales, offsets)
        }
    }
}
