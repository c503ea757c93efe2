//! Reads a tensor in place.

use rayon::ThreadPool;

use super::chunk::{CHUNK, Values, Width, half_value};
use super::layout::Side;
use super::{HEADER_BYTES, Layout, corrupt};
use crate::Result;
use crate::formats::groupwise;

/// A tensor over borrowed bytes.
#[derive(Debug, Clone)]
pub struct View<'a> {
    data: &'a [u8],
    layout: Layout,
    starts: Vec<usize>,
    base: groupwise::View<'a>,
}

/// One row of a factor.
#[derive(Debug, Clone, Copy)]
pub struct FactorRow<'a> {
    width: Width,
    scales: &'a [u8],
    codes: &'a [u8],
}

impl FactorRow<'_> {
    /// The scale and the values of a chunk: codes minus their middle, or f16 values.
    #[inline(always)]
    pub fn chunk(&self, index: usize) -> (f32, Values) {
        let bytes = self.width.chunk_bytes();
        let values = self.width.unpack(&self.codes[index * bytes..][..bytes]);
        (self.scale(index), values)
    }

    /// The width of the values.
    #[inline(always)]
    pub fn width(&self) -> Width {
        self.width
    }

    /// The bytes of a chunk, [`Width::chunk_bytes`] of them.
    #[inline(always)]
    pub fn bytes(&self, index: usize) -> &[u8] {
        let bytes = self.width.chunk_bytes();
        &self.codes[index * bytes..][..bytes]
    }

    /// The scale of a chunk as the kernels read it, without branches: finite ones exactly, others as finite numbers.
    #[inline(always)]
    pub fn finite_scale(&self, index: usize) -> f32 {
        if self.width == Width::Half {
            return 1.0;
        }
        half_value(u16::from_le_bytes([
            self.scales[2 * index],
            self.scales[2 * index + 1],
        ]))
    }

    /// The scale of a chunk; 1 for f16 values.
    #[inline(always)]
    pub fn scale(&self, index: usize) -> f32 {
        if self.width == Width::Half {
            return 1.0;
        }
        half::f16::from_le_bytes([self.scales[2 * index], self.scales[2 * index + 1]]).to_f32()
    }
}

impl<'a> View<'a> {
    /// Checks the headers, the ranks and the size.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) or `InsufficientData` if the bytes are not such a tensor.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let (layout, starts) = Layout::read(data)?;
        let base = groupwise::View::parse(&data[HEADER_BYTES..][..layout.base().total_bytes()])?;
        Ok(View {
            data,
            layout,
            starts,
            base,
        })
    }

    /// The shape, widths and sizes.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The embedded group-wise tensor.
    pub fn base(&self) -> &groupwise::View<'a> {
        &self.base
    }

    /// The rank of an expert.
    pub fn rank(&self, expert: usize) -> usize {
        self.starts[expert + 1] - self.starts[expert]
    }

    /// Row `index` of an expert's V.
    #[inline]
    pub fn right(&self, expert: usize, index: usize) -> FactorRow<'a> {
        self.row(self.layout.right(), self.starts[expert] + index)
    }

    /// Row `index` of an expert's U^T.
    #[inline]
    pub fn left(&self, expert: usize, index: usize) -> FactorRow<'a> {
        self.row(self.layout.left(), self.starts[expert] + index)
    }

    #[inline]
    fn row(&self, side: Side, row: usize) -> FactorRow<'a> {
        let width = self.layout.width();
        let bytes = side.chunks * width.chunk_bytes();
        let scales = if width == Width::Half { 0 } else { 2 * side.chunks };
        FactorRow {
            width,
            scales: &self.data[side.scales_at + row * scales..][..scales],
            codes: &self.data[side.codes_at + row * bytes..][..bytes],
        }
    }

    /// Decodes the values of an expert's row: those of the group-wise tensor, plus its row of U times V, added rank
    /// by rank.
    pub fn decode_values(&self, expert: usize, row: usize, values: &mut [f32]) {
        let rows = self.layout.shape().rows;
        self.base.decode_values(expert * rows + row, values);
        for index in 0..self.rank(expert) {
            let (scale, left) = self.left(expert, index).chunk(row / CHUNK);
            let factor = scale * left[row % CHUNK];
            let right = self.right(expert, index);
            for (at, values) in values.chunks_mut(CHUNK).enumerate() {
                let (scale, right) = right.chunk(at);
                let factor = factor * scale;
                for (value, right) in values.iter_mut().zip(right) {
                    *value += factor * right;
                }
            }
        }
    }

    /// Checks the embedded tensor, that scales are finite, and that all padding is zero: between sections and in the
    /// last chunk of each row.
    ///
    /// # Errors
    /// [`Error::Corruption`](crate::Error) that names the fault.
    pub fn verify(&self, pool: &ThreadPool) -> Result<()> {
        self.base.verify(pool)?;
        let (right, left) = (self.layout.right(), self.layout.left());
        let ranks_end = self.layout.ranks_at() + 4 * self.layout.shape().experts;
        let scales_end = |side: Side| match self.layout.width() {
            Width::Half => side.scales_at,
            _ => side.scales_at + 2 * side.chunks * self.layout.total_rank(),
        };
        let gaps = [
            HEADER_BYTES + self.layout.base().total_bytes()..self.layout.ranks_at(),
            ranks_end..right.scales_at,
            scales_end(right)..right.codes_at,
            right.end..left.scales_at,
            scales_end(left)..left.codes_at,
            left.end..self.data.len(),
        ];
        if gaps.into_iter().any(|gap| self.data[gap].iter().any(|&b| b != 0)) {
            return corrupt("padding is not zero");
        }
        for (name, side) in [("V", right), ("U", left)] {
            for row in 0..self.layout.total_rank() {
                self.check_row(side, row)
                    .or_else(|what| corrupt(format!("row {row} of {name}: {what}")))?;
            }
        }
        Ok(())
    }

    fn check_row(&self, side: Side, number: usize) -> std::result::Result<(), String> {
        let row = self.row(side, number);
        if self.layout.width() == Width::Half {
            let infinite = |half: &[u8; 2]| u16::from_le_bytes(*half) & 0x7c00 == 0x7c00;
            if row.codes.as_chunks::<2>().0.iter().any(infinite) {
                return Err("a value is not finite".into());
            }
        }
        if let Some(at) = (0..side.chunks).find(|&at| !row.scale(at).is_finite()) {
            return Err(format!("scale {} of chunk {at} is not finite", row.scale(at)));
        }
        let used = side.length % CHUNK;
        if used > 0 && row.chunk(side.chunks - 1).1[used..].iter().any(|&v| v != 0.0) {
            return Err("values after the last column are not zero".into());
        }
        Ok(())
    }
}
