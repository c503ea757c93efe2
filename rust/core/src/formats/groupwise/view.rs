//! Reading a tensor in place.

use std::ops::Range;

use super::{BLOCK_ROWS, HEADER_BYTES, Layout, REGISTER_BYTES};
use crate::Result;
use crate::bits::{self, UNIT};

/// A tensor read in place.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [u8],
    layout: Layout,
}

impl<'a> View<'a> {
    /// Checks header and size.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) or `InsufficientData`: the bytes are no such tensor.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let layout = Layout::read(data)?;
        Ok(View { data, layout })
    }

    /// Shape, spec and sizes.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// All bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.data
    }

    /// Block `block` of all experts' blocks.
    #[inline]
    pub fn block(&self, block: usize) -> &'a [u8] {
        let bytes = self.layout.block_bytes();
        &self.data[HEADER_BYTES + block * bytes..][..bytes]
    }

    /// The bytes of some of all experts' blocks, to be prefetched.
    pub fn memory(&self, blocks: Range<usize>) -> &'a [u8] {
        let bytes = self.layout.block_bytes();
        &self.data[HEADER_BYTES + blocks.start * bytes..HEADER_BYTES + blocks.end * bytes]
    }

    /// The block and the lane of a row of all experts' rows.
    fn locate(&self, row: usize) -> (&'a [u8], usize) {
        let rows = self.layout.shape().rows;
        let (expert, row) = (row / rows, row % rows);
        let block = expert * self.layout.blocks() + row / BLOCK_ROWS;
        (self.block(block), row % BLOCK_ROWS)
    }

    /// Scale and stored offset (of a symmetric tensor, the one that follows) of a group of a row of all experts' rows.
    pub fn parameters(&self, row: usize, group: usize) -> (f32, f32) {
        let (block, lane) = self.locate(row);
        self.layout.block_parameters(block, lane, group)
    }

    /// The codes of a row of all experts' rows, `[C]`.
    pub fn decode_row(&self, row: usize, codes: &mut [u8]) {
        let (block, lane) = self.locate(row);
        for (unit, codes) in codes.chunks_mut(UNIT).enumerate() {
            codes.copy_from_slice(&self.layout.unit(block, lane, unit)[..codes.len()]);
        }
    }

    /// The values of a row of all experts' rows, `[C]` ([`Layout::block_values`]).
    pub fn decode_values(&self, row: usize, values: &mut [f32]) {
        let (block, lane) = self.locate(row);
        self.layout.block_values(block, lane, values);
    }
}

impl Layout {
    /// Scale and offset of a group of lane `lane` of a block.
    pub(super) fn block_parameters(&self, block: &[u8], lane: usize, group: usize) -> (f32, f32) {
        let spec = self.spec();
        let value = |kind: usize| {
            let at = self.parameters_at(group) + 2 * (kind * BLOCK_ROWS + lane);
            spec.parameters
                .value(u16::from_le_bytes([block[at], block[at + 1]]))
        };
        match spec.symmetric {
            true => {
                let scale = value(0);
                (scale, -scale * (1u32 << (spec.bits - 1)) as f32)
            }
            false => (value(0), value(1)),
        }
    }

    /// The codes of unit `unit` (32 columns) of lane `lane` of a block.
    pub(super) fn unit(&self, block: &[u8], lane: usize, unit: usize) -> [u8; UNIT] {
        let registers = &block[self.unit_at(unit)..][..self.bits() * REGISTER_BYTES];
        let mut words = [0; 8];
        for (word, register) in words.iter_mut().zip(registers.as_chunks::<REGISTER_BYTES>().0) {
            *word = u32::from_le_bytes(register.as_chunks::<4>().0[lane]);
        }
        let mut codes = [0; UNIT];
        bits::unpack(self.spec().bits, &words, &mut codes);
        codes
    }

    /// The values of lane `lane` of a block, `[C]`: `scale * code + offset`, or `scale * (code - 2^(bits - 1))`, each
    /// operation rounded to f32.
    pub fn block_values(&self, block: &[u8], lane: usize, values: &mut [f32]) {
        let spec = self.spec();
        let middle = (1u32 << (spec.bits - 1)) as f32;
        // A group has a multiple of 16 columns, or all; 16 columns of a unit share their parameters.
        for (unit, values) in values.chunks_mut(UNIT).enumerate() {
            let codes = self.unit(block, lane, unit);
            for (half, (values, codes)) in values
                .chunks_mut(UNIT / 2)
                .zip(codes.chunks(UNIT / 2))
                .enumerate()
            {
                let group = (unit * UNIT + half * UNIT / 2) / self.group_size();
                let (scale, offset) = self.block_parameters(block, lane, group);
                for (value, &code) in values.iter_mut().zip(codes) {
                    *value = match spec.symmetric {
                        true => scale * (f32::from(code) - middle),
                        false => scale * f32::from(code) + offset,
                    };
                }
            }
        }
    }
}
