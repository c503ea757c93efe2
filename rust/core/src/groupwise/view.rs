//! Reading a tensor in place.

use super::{BLOCK_ROWS, HEADER_BYTES, Layout, REGISTER_BYTES};
use crate::Result;
use crate::bits::{self, UNIT};

/// A tensor read in place.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [u8],
    layout: Layout,
}

/// Sixteen rows of an expert.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// For each group 16 scales, then, unless the tensor is symmetric, 16 offsets; then zeros.
    pub parameters: &'a [u8],
    /// For each 32 columns `bits` registers of 64 bytes.
    pub codes: &'a [u8],
}

/// What a product reads: blocks of rows, from wherever they come.
pub trait Blocks: Sync {
    /// Shape, spec and sizes.
    fn layout(&self) -> Layout;

    /// Block `block` of all experts' blocks, in place or made in `buffer`.
    fn fetch<'s>(&'s self, block: usize, buffer: &'s mut Vec<u8>) -> Block<'s>;
}

impl<B: Blocks + ?Sized> Blocks for &B {
    fn layout(&self) -> Layout {
        (**self).layout()
    }

    fn fetch<'s>(&'s self, block: usize, buffer: &'s mut Vec<u8>) -> Block<'s> {
        (**self).fetch(block, buffer)
    }
}

impl Blocks for View<'_> {
    fn layout(&self) -> Layout {
        self.layout
    }

    fn fetch<'s>(&'s self, block: usize, _: &'s mut Vec<u8>) -> Block<'s> {
        self.block(block)
    }
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
    pub fn block(&self, block: usize) -> Block<'a> {
        let bytes = self.layout.block_bytes();
        self.layout
            .split(&self.data[HEADER_BYTES + block * bytes..][..bytes])
    }

    /// The block and the lane of a row of all experts' rows.
    fn locate(&self, row: usize) -> (Block<'a>, usize) {
        let rows = self.layout.shape().rows;
        let (expert, row) = (row / rows, row % rows);
        let block = expert * self.layout.blocks() + row / BLOCK_ROWS;
        (self.block(block), row % BLOCK_ROWS)
    }

    /// Scale and stored offset (of a symmetric tensor, the one that follows) of a group of a row of all experts' rows.
    pub fn parameters(&self, row: usize, group: usize) -> (f32, f32) {
        let (block, lane) = self.locate(row);
        self.block_parameters(&block, lane, group)
    }

    /// Scale and offset of a group of lane `lane` of a block.
    pub(super) fn block_parameters(&self, block: &Block, lane: usize, group: usize) -> (f32, f32) {
        let spec = self.layout.spec();
        let value = |index: usize| {
            let at = 2 * (index * BLOCK_ROWS + lane);
            let bits = u16::from_le_bytes([block.parameters[at], block.parameters[at + 1]]);
            spec.parameters.value(bits)
        };
        match spec.symmetric {
            true => {
                let scale = value(group);
                (scale, -scale * (1u32 << (spec.bits - 1)) as f32)
            }
            false => (value(2 * group), value(2 * group + 1)),
        }
    }

    /// The codes of unit `unit` (32 columns) of lane `lane` of a block.
    pub(super) fn unit(&self, block: &Block, lane: usize, unit: usize) -> [u8; UNIT] {
        let bits = self.layout.bits();
        let registers = &block.codes[unit * bits * REGISTER_BYTES..][..bits * REGISTER_BYTES];
        let mut words = [0; 8];
        for (word, register) in words.iter_mut().zip(registers.as_chunks::<REGISTER_BYTES>().0) {
            *word = u32::from_le_bytes(register.as_chunks::<4>().0[lane]);
        }
        let mut codes = [0; UNIT];
        bits::unpack(self.layout.spec().bits, &words, &mut codes);
        codes
    }

    /// The codes of a row of all experts' rows, `[C]`.
    pub fn decode_row(&self, row: usize, codes: &mut [u8]) {
        let (block, lane) = self.locate(row);
        for (unit, codes) in codes.chunks_mut(UNIT).enumerate() {
            codes.copy_from_slice(&self.unit(&block, lane, unit)[..codes.len()]);
        }
    }

    /// The values of a row of all experts' rows, `[C]`: `scale * code + offset`, or `scale * (code - 2^(bits - 1))`,
    /// each operation rounded to f32.
    pub fn decode_values(&self, row: usize, values: &mut [f32]) {
        let (block, lane) = self.locate(row);
        let spec = self.layout.spec();
        let middle = (1u32 << (spec.bits - 1)) as f32;
        let group_size = self.layout.group_size();
        for (unit, values) in values.chunks_mut(UNIT).enumerate() {
            let codes = self.unit(&block, lane, unit);
            for (i, value) in values.iter_mut().enumerate() {
                let group = (unit * UNIT + i) / group_size;
                let (scale, offset) = self.block_parameters(&block, lane, group);
                let code = f32::from(codes[i]);
                *value = if spec.symmetric {
                    scale * (code - middle)
                } else {
                    scale * code + offset
                };
            }
        }
    }
}
