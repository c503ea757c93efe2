//! Group-wise weights as [`crate::gemm::panel`] multiplies them, for the mode `bf16`.
//!
//! Panels hold weights rounded to bf16 ([`super::rounded`]), whose products add up over the whole row. Scaling the sums of
//! codes group by group instead, in matrix registers, decodes faster but took twice as long with 64 tokens and more.
//!
//! Experts with few tokens are multiplied exactly: reading takes the time, and their kernels need no panel. From how many
//! tokens on panels are faster was measured on 14336 x 4096 ([`fewest`]).

use std::ops::Range;

use super::rounded;
use crate::bits::UNIT;
use crate::formats::groupwise::{Blocks, Layout, ParameterType, REGISTER_BYTES};
use crate::gemm::panel::{
    Backend, Element, LANES, Line, Section, Source, Square, Tile, TokenForm, round_token,
};
use crate::simd::Isa;
use crate::types::Activations;
use crate::types::Shape;

/// Quads (four columns of each row) of a unit.
pub(super) const QUADS: usize = UNIT / 4;
/// How far ahead of the codes in use memory is asked for, in bytes.
pub(super) const AHEAD: usize = 1536;

/// The tokens of an expert from which on panels are faster.
pub(super) fn fewest(backend: Backend) -> usize {
    match backend {
        Backend::Matrix => 5,
        Backend::Avx512 => 10,
        Backend::Avx2 => 8,
        _ => 2,
    }
}

/// A tensor, and how its panels are made.
pub(super) struct Panels<'a, B> {
    blocks: &'a B,
    layout: Layout,
    /// The set that decodes it.
    isa: Isa,
}

impl<'a, B: Blocks> Panels<'a, B> {
    /// The panels that a backend, which was found available, multiplies.
    pub fn new(blocks: &'a B, backend: Backend) -> Self {
        Panels {
            blocks,
            layout: blocks.layout(),
            isa: backend.vectors(),
        }
    }

    fn part<'s>(
        &'s self,
        block: usize,
        buffer: &'s [u8],
        units: Range<usize>,
        unused: &'s mut Vec<u8>,
    ) -> Part<'s> {
        Part {
            block: match buffer.is_empty() {
                true => self.blocks.fetch(block, unused),
                false => buffer,
            },
            layout: &self.layout,
            units,
        }
    }
}

impl<B: Blocks> Source for Panels<'_, B> {
    /// The block's bytes where they are coded.
    type Open = Vec<u8>;

    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.layout.shape().columns,
            section: self.layout.units().max(1),
            variant: 0,
        }
    }

    fn token(&self, x: &Activations, token: usize, lane: usize, tile: &mut Tile) {
        let columns = self.layout.shape().columns;
        round_token(self.isa, x, (token, columns, 1), lane, tile);
    }

    fn open(&self, block: usize, buffer: &mut Vec<u8>) {
        self.blocks.fetch(block, buffer);
    }

    fn decode(&self, block: usize, buffer: &mut Vec<u8>, chunks: Range<usize>, to: &mut [Line]) {
        let mut unused = Vec::new();
        let part = self.part(block, buffer, chunks, &mut unused);
        rounded::decode(self.isa, &part, to);
    }

    fn finish(&self, _: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        *out = sums.floats();
    }
}

/// Units (32 columns: a chunk of bf16) of a block.
pub(super) struct Part<'a> {
    pub block: &'a [u8],
    pub layout: &'a Layout,
    pub units: Range<usize>,
}

impl Part<'_> {
    /// The group of a column; of columns behind the last, the last group.
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

    /// Bytes of a group's parameters.
    fn group_bytes(&self) -> usize {
        2 * LANES * (2 - usize::from(self.layout.spec().symmetric))
    }

    /// What a symmetric tensor subtracts from its codes.
    fn middle(&self) -> f32 {
        (1u32 << (self.layout.bits() - 1)) as f32
    }

    /// Scales and offsets of a group.
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
        /// Scales, and offsets less `middle` scales, of a group.
        ///
        /// # Safety
        /// The processor has AVX-512.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
        pub unsafe fn vectors(&self, group: usize, middle: f32) -> (__m512, __m512) {
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
