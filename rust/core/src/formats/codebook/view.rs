//! Reads a codebook tensor in place.

use super::bits::{LANE, QUADS, REGISTER, step_columns, step_registers, unpack};
use super::{HEADER_BYTES, Layout, PANEL, corrupt, join};
use crate::Result;
use crate::hadamard::rotate;
use crate::simd::Isa;

/// A codebook tensor over borrowed bytes.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [u8],
    layout: Layout,
}

/// A column block of a row block: the parameters and codes of 16 rows.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    bits: u8,
    /// The bytes of a stored centroid: 2, or 1 for the high byte alone.
    centroid_bytes: usize,
    parameters: &'a [u8],
    codes: &'a [u8],
}

impl<'a> View<'a> {
    /// Checks the header and the size and borrows the tensor.
    ///
    /// # Errors
    /// [`crate::Error::InsufficientData`] if the bytes end early, [`crate::Error::Corruption`] if they contradict the
    /// format.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let layout = Layout::read(data)?;
        Ok(View { data, layout })
    }

    /// The shape, bits, block size and offsets.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The bytes of an expert: its row blocks in order.
    pub fn expert(&self, expert: usize) -> &'a [u8] {
        let size = self.layout.panels() * self.layout.panel_bytes();
        &self.data[HEADER_BYTES + expert * size..][..size]
    }

    /// Column block `block` of row block `row_block` of expert `expert`.
    #[inline]
    pub fn block(&self, expert: usize, row_block: usize, block: usize) -> Block<'a> {
        let layout = &self.layout;
        let start = (expert * layout.panels() + row_block) * layout.panel_bytes();
        let data = &self.data[HEADER_BYTES + start + layout.block_at(block)..];
        let (parameters, rest) = data.split_at(layout.parameter_bytes());
        Block {
            bits: layout.bits(),
            centroid_bytes: layout.planes(),
            parameters,
            codes: &rest[..layout.steps(block) * layout.step_bytes()],
        }
    }

    /// Unpacks the codes of a row of an expert, `[C]`.
    pub fn decode_row(&self, expert: usize, row: usize, codes: &mut [u8]) {
        let mut padded = Vec::new();
        for (block, codes) in codes.chunks_mut(self.layout.block_size()).enumerate() {
            let source = self.block(expert, row / PANEL, block);
            padded.resize(source.columns(), 0);
            source.decode_row(row % PANEL, &mut padded);
            codes.copy_from_slice(&padded[..codes.len()]);
        }
    }

    /// Dequantizes a row of an expert, `[C]`: the product of scale and centroid, rounded to f32 once. Rows of rotated
    /// weights are rotated back.
    pub fn decode_values(&self, expert: usize, row: usize, values: &mut [f32]) {
        let mut codes = vec![0; values.len()];
        self.decode_row(expert, row, &mut codes);
        let size = self.layout.block_size();
        for (block, (values, codes)) in values.chunks_mut(size).zip(codes.chunks(size)).enumerate() {
            let source = self.block(expert, row / PANEL, block);
            let scale = source.scales()[row % PANEL];
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = scale * source.centroid(row % PANEL, usize::from(code)) as f32;
            }
        }
        if self.layout.hadamard() > 1 {
            rotate(Isa::SCALAR, values, self.layout.hadamard());
        }
    }

    /// Checks that scales are finite and not negative, centroids are in range, sums are correct and all padding is
    /// zero.
    ///
    /// # Errors
    /// [`crate::Error::Corruption`] that names the expert, the row and the column block.
    pub fn verify(&self) -> Result<()> {
        let layout = self.layout;
        for expert in 0..layout.shape().experts {
            for row in 0..layout.panels() * PANEL {
                for block in 0..layout.blocks() {
                    let columns = if row < layout.shape().rows {
                        layout.block_columns(block)
                    } else {
                        0
                    };
                    if let Err(what) = self.block(expert, row / PANEL, block).check(
                        row % PANEL,
                        columns,
                        layout.largest_scale(),
                    ) {
                        return corrupt(format!("expert {expert} row {row} block {block}: {what}"));
                    }
                }
            }
        }
        Ok(())
    }
}

impl<'a> Block<'a> {
    /// The bits per code.
    #[inline(always)]
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// The centroids of a codebook.
    #[inline(always)]
    pub fn clusters(&self) -> usize {
        1 << self.bits
    }

    /// The columns of the block, padded to whole steps.
    #[inline]
    pub fn columns(&self) -> usize {
        let step = QUADS * REGISTER * step_registers(self.bits);
        self.codes.len() / step * step_columns(self.bits)
    }

    /// The bytes of a stored centroid: 2, or 1 for the high byte alone.
    #[inline(always)]
    pub fn planes(&self) -> usize {
        self.centroid_bytes
    }

    /// The shuffle table of a row: the high bytes of its centroids (`byte` 0) or the low bytes (1), repeated to 16
    /// entries; zeros if the low bytes are not stored.
    #[inline(always)]
    pub fn table(&self, byte: usize, row: usize) -> [u8; LANE] {
        let clusters = self.clusters();
        if byte >= self.centroid_bytes {
            return [0; LANE];
        }
        let bytes = &self.parameters[(byte * PANEL + row) * clusters..][..clusters];
        std::array::from_fn(|i| bytes[i % clusters])
    }

    /// Centroid `code` of a row.
    #[inline(always)]
    pub fn centroid(&self, row: usize, code: usize) -> i32 {
        let byte = |i: usize| self.parameters[(i * PANEL + row) * self.clusters() + code] as i8;
        join(byte(0), if self.centroid_bytes > 1 { byte(1) } else { 0 })
    }

    /// Section `section` of the parameters after the centroids, one word per row: the scales, then the sums.
    #[inline(always)]
    fn words(&self, section: usize) -> [[u8; 4]; PANEL] {
        let at = self.centroid_bytes * PANEL * self.clusters() + 4 * PANEL * section;
        let words = self.parameters[at..at + 4 * PANEL].as_chunks().0;
        words.first_chunk().copied().unwrap_or_default()
    }

    /// The scales of the rows.
    #[inline(always)]
    pub fn scales(&self) -> [f32; PANEL] {
        self.words(0).map(f32::from_le_bytes)
    }

    /// The sums over the columns for each row: of high bytes (`which` 0) or, if both bytes are stored, of whole
    /// centroids (1).
    #[inline(always)]
    pub fn sums(&self, which: usize) -> [i32; PANEL] {
        self.words(1 + which).map(i32::from_le_bytes)
    }

    /// The high bytes of the centroids (`byte` 0) or, if both are stored, the low bytes (1), row by row.
    #[inline(always)]
    pub fn plane(&self, byte: usize) -> &'a [u8] {
        let size = PANEL * self.clusters();
        &self.parameters[byte * size..][..size]
    }

    /// The address of the block's first byte.
    #[inline(always)]
    pub fn start(&self) -> *const u8 {
        self.parameters.as_ptr()
    }

    /// The size of the parameters in bytes; the codes follow.
    #[inline(always)]
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.len()
    }

    /// The packed codes: for each step of columns, the registers of each quad or the lines ([`super::bits`]).
    #[inline(always)]
    pub fn registers(&self) -> &'a [[u8; REGISTER]] {
        self.codes.as_chunks().0
    }

    /// Unpacks the codes of a row, padded to whole steps.
    #[inline(always)]
    pub fn decode_row(&self, row: usize, codes: &mut [u8]) {
        let steps = self.registers().chunks_exact(QUADS * step_registers(self.bits));
        for (registers, codes) in steps.zip(codes.chunks_exact_mut(step_columns(self.bits))) {
            unpack(self.bits, registers, row, codes);
        }
    }

    /// Checks a row of `columns` columns without padding, 0 for a padding row; its scale must be at most `largest`.
    fn check(&self, row: usize, columns: usize, largest: f32) -> std::result::Result<(), String> {
        let mut codes = vec![0; self.columns()];
        self.decode_row(row, &mut codes);
        if codes[columns..].iter().any(|&code| code != 0) {
            return Err("codes after the last column are not zero".into());
        }
        let scale = self.scales()[row];
        if !(0.0..=largest).contains(&scale) {
            return Err(format!("scale {scale} is out of range"));
        }
        let mut sums = [0i32; 2];
        for &code in &codes[..columns] {
            sums[0] += i32::from(self.table(0, row)[usize::from(code)] as i8);
            sums[1] = sums[1].wrapping_add(self.centroid(row, usize::from(code)));
        }
        if (0..self.centroid_bytes).any(|which| sums[which] != self.sums(which)[row]) {
            return Err("wrong sums of centroids".into());
        }
        let centroids = (0..self.clusters()).map(|code| self.centroid(row, code));
        if centroids.clone().any(|c| c.abs() > super::MAX_CENTROID.into()) {
            return Err("a centroid is out of range".into());
        }
        if columns == 0
            && (scale.to_bits() != 0 || centroids.sum::<i32>() != 0 || self.table(0, row) != [0; LANE])
        {
            return Err("a padding row is not zero".into());
        }
        Ok(())
    }
}
