//! The shape and the offsets of a codebook tensor, all derived from the header.

use super::bits::{QUADS, REGISTER, step_columns, step_registers};
use super::{BLOCK_UNIT, HEADER_BYTES, MAGIC, PANEL, VERSION, corrupt, invalid};
use crate::formats::header;
use crate::types::Shape;
use crate::{Error, Result, limits};

/// The maximum number of columns: 255 * 127 * 2^16 < 2^31, so that an integer product of a whole row fits 32 bits.
pub const MAX_COLUMNS: usize = 1 << 16;

/// The shape, bits, block size and offsets of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    bits: u8,
    activation_bits: u8,
    block: usize,
    hadamard: usize,
    total: usize,
}

impl Layout {
    /// The layout for a writer; a block larger than the row means the whole row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a value is out of range or the tensor is too large.
    pub fn new(shape: Shape, bits: u8, activation_bits: u8, block: usize, hadamard: usize) -> Result<Layout> {
        let whole = shape.columns.max(1).next_multiple_of(BLOCK_UNIT);
        match Layout::of(shape, bits, activation_bits, block.min(whole), hadamard) {
            Some(layout) => Ok(layout),
            None => invalid(format!(
                "{shape:?} of {bits} bits, activations of {activation_bits}, blocks of {block}, rotated by {hadamard} \
                 cannot be packed"
            )),
        }
    }

    /// The layout of a tensor; `None` if a value is out of range or the size overflows.
    pub(super) fn of(
        shape: Shape,
        bits: u8,
        activation_bits: u8,
        block: usize,
        hadamard: usize,
    ) -> Option<Layout> {
        let rotatable =
            hadamard.is_power_of_two() && shape.columns > 0 && shape.columns.is_multiple_of(hadamard);
        let sane = shape.has_valid_ndim()
            && matches!(bits, 2..=4)
            && matches!(activation_bits, 0 | 4 | 8)
            && block > 0
            && block.is_multiple_of(BLOCK_UNIT)
            && block <= MAX_COLUMNS
            && shape.columns <= MAX_COLUMNS
            && (hadamard == 1 || rotatable)
            && [shape.experts, shape.rows]
                .iter()
                .all(|&n| n as u64 <= limits::MAX_ROWS);
        let mut layout = sane.then_some(Layout {
            shape,
            bits,
            activation_bits,
            block,
            hadamard,
            total: 0,
        })?;
        let row_blocks = shape.experts.checked_mul(shape.rows.div_ceil(PANEL))?;
        layout.total = row_blocks
            .checked_mul(layout.panel_bytes())?
            .checked_add(HEADER_BYTES)?;
        isize::try_from(layout.total).ok()?;
        Some(layout)
    }

    /// Experts, rows, columns and ndim.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bits per code.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// The bits of the activations in products: 4 or 8, or 0 if they are not rounded.
    pub fn activation_bits(&self) -> u8 {
        self.activation_bits
    }

    /// The centroids of a codebook.
    pub fn clusters(&self) -> usize {
        1 << self.bits
    }

    /// The largest scale for which every weight is finite, including sums of the Hadamard rotation.
    pub fn largest_scale(&self) -> f32 {
        f32::MAX / f32::from(super::MAX_CENTROID) / self.hadamard as f32
    }

    /// The width of the Hadamard rotation of weights and activations ([`crate::hadamard`]), a power of two that
    /// divides the columns; 1 means no rotation.
    pub fn hadamard(&self) -> usize {
        self.hadamard
    }

    /// The number of columns that share a codebook.
    pub fn block_size(&self) -> usize {
        self.block
    }

    /// The column blocks of a row.
    pub fn blocks(&self) -> usize {
        self.shape.columns.div_ceil(self.block)
    }

    /// The row blocks of an expert.
    pub fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// The columns of column block `block`, without padding.
    pub fn block_columns(&self, block: usize) -> usize {
        self.block.min(self.shape.columns - block * self.block)
    }

    /// The columns of a row, padded to whole steps.
    pub fn padded_columns(&self) -> usize {
        self.shape.columns.next_multiple_of(step_columns(self.bits))
    }

    /// The steps of column block `block`.
    pub fn steps(&self, block: usize) -> usize {
        self.block_columns(block).div_ceil(step_columns(self.bits))
    }

    /// The bytes of a step of a row block.
    pub fn step_bytes(&self) -> usize {
        QUADS * REGISTER * step_registers(self.bits)
    }

    /// The bytes of a stored centroid: 2, or 1 if products round activations, because the low byte is then zero.
    pub fn planes(&self) -> usize {
        if self.activation_bits == 0 { 2 } else { 1 }
    }

    /// The bytes of the parameters of a [`super::Block`]: centroids, scales, and one sum per stored byte of a
    /// centroid.
    pub fn parameter_bytes(&self) -> usize {
        PANEL * (4 + self.planes() * (self.clusters() + 4))
    }

    /// The offset of column block `block` in its row block.
    pub(super) fn block_at(&self, block: usize) -> usize {
        let whole = self.block / step_columns(self.bits) * self.step_bytes();
        block * (self.parameter_bytes() + whole)
    }

    /// The bytes of a row block.
    pub fn panel_bytes(&self) -> usize {
        let steps = self.shape.columns.div_ceil(step_columns(self.bits));
        self.blocks() * self.parameter_bytes() + steps * self.step_bytes()
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// The size of the tensor with low bytes and second sums, which older versions stored for rounded activations,
    /// too.
    fn with_low_bytes(&self) -> Option<usize> {
        if self.activation_bits == 0 {
            return None;
        }
        let blocks = self.shape.experts * self.panels() * self.blocks();
        blocks
            .checked_mul(PANEL * (self.clusters() + 4))?
            .checked_add(self.total)
    }

    pub(super) fn read(data: &[u8]) -> Result<Layout> {
        let header: &[u8; HEADER_BYTES] = header::read(data, "codebook tensor", MAGIC, VERSION)?;
        if header[14..16].iter().chain(&header[48..]).any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let size = |at: usize| {
            let word = header[at..at + 8].try_into().map_or(u64::MAX, u64::from_le_bytes);
            usize::try_from(word).unwrap_or(usize::MAX)
        };
        let shape = Shape {
            experts: size(16),
            rows: size(24),
            columns: size(32),
            ndim: header[12],
        };
        let hadamard = 1usize.checked_shl(header[13].into()).unwrap_or(0);
        match Layout::of(shape, header[10], header[11], size(40), hadamard) {
            Some(layout) if layout.total == data.len() => Ok(layout),
            Some(layout) if layout.with_low_bytes() == Some(data.len()) => corrupt(
                "written by an older version of moepack, which stored low bytes that are zeros; pack the model again",
            ),
            Some(layout) if layout.total > data.len() => {
                let message = format!(
                    "codebook tensor: {} bytes instead of {}",
                    data.len(),
                    layout.total
                );
                Err(Error::InsufficientData(message))
            }
            Some(layout) => corrupt(format!("{} bytes instead of {}", data.len(), layout.total)),
            None => corrupt(format!(
                "{shape:?} of {} bits, activations of {}, blocks of {} is not a valid layout",
                header[10],
                header[11],
                size(40)
            )),
        }
    }

    pub(super) fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        let hadamard = self.hadamard.trailing_zeros() as u8;
        out[10..14].copy_from_slice(&[self.bits, self.activation_bits, self.shape.ndim, hadamard]);
        let sizes = [
            self.shape.experts,
            self.shape.rows,
            self.shape.columns,
            self.block,
        ];
        for (field, size) in out[16..48].chunks_exact_mut(8).zip(sizes) {
            field.copy_from_slice(&(size as u64).to_le_bytes());
        }
    }
}
