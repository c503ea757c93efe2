//! Reads a tensor in place.

use std::ops::Range;

use super::{BLOCK_ROWS, HEADER_BYTES, Layout, REGISTER_BYTES};
use crate::Result;
use crate::bits::{self, UNIT};

/// A tensor over borrowed bytes.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [u8],
    layout: Layout,
}

impl<'a> View<'a> {
    /// Checks the header and the size.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) or `InsufficientData` if the bytes are not such a tensor.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let layout = Layout::read(data)?;
        Ok(View { data, layout })
    }

    /// The shape, specification and sizes.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// All bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.data
    }

    /// A block, counted over all experts.
    #[inline]
    pub fn block(&self, block: usize) -> &'a [u8] {
        let bytes = self.layout.block_bytes();
        &self.data[HEADER_BYTES + block * bytes..][..bytes]
    }

    /// The bytes of a range of blocks, counted over all experts, for prefetching.
    pub fn memory(&self, blocks: Range<usize>) -> &'a [u8] {
        let bytes = self.layout.block_bytes();
        &self.data[HEADER_BYTES + blocks.start * bytes..HEADER_BYTES + blocks.end * bytes]
    }

    /// The block and the lane of a row, counted over all experts.
    fn locate(&self, row: usize) -> (&'a [u8], usize) {
        let rows = self.layout.shape().rows;
        let (expert, row) = (row / rows, row % rows);
        let block = expert * self.layout.blocks() + row / BLOCK_ROWS;
        (self.block(block), row % BLOCK_ROWS)
    }

    /// The scale and the offset of a group; for a symmetric tensor, the implied offset. `row` is counted over all
    /// experts.
    pub fn parameters(&self, row: usize, group: usize) -> (f32, f32) {
        let (block, lane) = self.locate(row);
        self.layout.block_parameters(block, lane, group)
    }

    /// Unpacks the codes of a row, counted over all experts, `[C]`.
    pub fn decode_row(&self, row: usize, codes: &mut [u8]) {
        let (block, lane) = self.locate(row);
        for (unit, codes) in codes.chunks_mut(UNIT).enumerate() {
            codes.copy_from_slice(&self.layout.unit(block, lane, unit)[..codes.len()]);
        }
    }

    /// Decodes the values of a row, counted over all experts, `[C]` ([`Layout::block_values`]).
    pub fn decode_values(&self, row: usize, values: &mut [f32]) {
        let (block, lane) = self.locate(row);
        self.layout.block_values(block, lane, values);
    }
}

impl Layout {
    /// The scale and the offset of a group of lane `lane` of a block.
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

    /// Decodes the values of lane `lane` of a block, `[C]`: `scale * code + offset`, or `scale * (code - 2^(bits -
    /// 1))`, each operation rounded to f32.
    pub fn block_values(&self, block: &[u8], lane: usize, values: &mut [f32]) {
        let spec = self.spec();
        let middle = (1u32 << (spec.bits - 1)) as f32;
        // A group has a multiple of 16 columns, or all; each 16 columns of a unit share parameters.
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
