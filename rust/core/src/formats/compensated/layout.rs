//! The header, the ranks and the offsets that follow from them.

use std::ops::Range;

use super::chunk::{CHUNK, Width};
use super::{ALIGNMENT, HEADER_BYTES, MAGIC, VERSION, corrupt, invalid};
use crate::formats::{groupwise, header};
use crate::types::Shape;
use crate::{Error, Result};

/// The position of a factor's rows: T rows of `chunks` scales, then T rows of `chunks` chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    /// The values of a row: C for V, R for U^T.
    pub length: usize,
    /// The chunks of a row.
    pub chunks: usize,
    /// The offset of the scales.
    pub scales_at: usize,
    /// The offset of the chunks.
    pub codes_at: usize,
    /// The end of the chunks.
    pub end: usize,
}

/// The shape and offsets of a tensor; the ranks are not included, because they are read from its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    base: groupwise::Layout,
    width: Width,
    total_rank: usize,
    ranks_at: usize,
    sides: [Side; 2],
    total: usize,
}

impl Layout {
    /// The layout for a writer: factors of `bits` bits and `total_rank` rows beside a group-wise tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `bits` is not supported or the tensor is too large.
    pub fn new(base: groupwise::Layout, bits: u8, total_rank: usize) -> Result<Layout> {
        let layout = Width::from_bits(bits).and_then(|width| Layout::of(base, width, total_rank));
        layout.map_or_else(
            || {
                invalid(format!(
                    "factors of {bits} bits and total rank {total_rank} are not possible"
                ))
            },
            Ok,
        )
    }

    /// The layout of a group-wise tensor with factors of `total_rank` rows; `None` if its size overflows.
    pub(super) fn of(base: groupwise::Layout, width: Width, total_rank: usize) -> Option<Layout> {
        let shape = base.shape();
        let base_end = HEADER_BYTES.checked_add(base.total_bytes())?;
        let ranks_at = base_end.checked_next_multiple_of(ALIGNMENT)?;
        let mut end = ranks_at.checked_add(shape.experts.checked_mul(4)?)?;
        let mut side = |length: usize| {
            let chunks = length.div_ceil(CHUNK);
            let cells = chunks.checked_mul(total_rank)?;
            let scales = if width == Width::Half {
                0
            } else {
                cells.checked_mul(2)?
            };
            let scales_at = end.checked_next_multiple_of(ALIGNMENT)?;
            let codes_at = scales_at
                .checked_add(scales)?
                .checked_next_multiple_of(ALIGNMENT)?;
            end = codes_at.checked_add(cells.checked_mul(width.chunk_bytes())?)?;
            Some(Side {
                length,
                chunks,
                scales_at,
                codes_at,
                end,
            })
        };
        let sides = [side(shape.columns)?, side(shape.rows)?];
        let total = end.checked_next_multiple_of(ALIGNMENT)?;
        isize::try_from(total).ok()?;
        Some(Layout {
            base,
            width,
            total_rank,
            ranks_at,
            sides,
            total,
        })
    }

    /// Experts, rows, columns and ndim.
    pub fn shape(&self) -> Shape {
        self.base.shape()
    }

    /// The layout of the embedded group-wise tensor.
    pub fn base(&self) -> groupwise::Layout {
        self.base
    }

    /// The width of the factors.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The sum of all experts' ranks.
    pub fn total_rank(&self) -> usize {
        self.total_rank
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// The rows of V.
    pub fn right(&self) -> Side {
        self.sides[0]
    }

    /// The rows of U^T.
    pub fn left(&self) -> Side {
        self.sides[1]
    }

    /// The sections by name, with their positions.
    pub fn sections(&self) -> [(&'static str, Range<usize>); 6] {
        let [right, left] = self.sides;
        let scales = |side: Side| {
            let bytes = match self.width {
                Width::Half => 0,
                _ => 2 * side.chunks * self.total_rank,
            };
            side.scales_at..side.scales_at + bytes
        };
        let base = HEADER_BYTES..HEADER_BYTES + self.base.total_bytes();
        let ranks = self.ranks_at..self.ranks_at + 4 * self.shape().experts;
        [
            ("base", base),
            ("ranks", ranks),
            ("right_scales", scales(right)),
            ("right", right.codes_at..right.end),
            ("left_scales", scales(left)),
            ("left", left.codes_at..left.end),
        ]
    }

    pub(super) fn ranks_at(&self) -> usize {
        self.ranks_at
    }

    /// Reads the header, the embedded header and the ranks; the ranks as running sums, E + 1 of them.
    pub(super) fn read(data: &[u8]) -> Result<(Layout, Vec<usize>)> {
        let header: &[u8; HEADER_BYTES] = header::read(data, "compensated tensor", MAGIC, VERSION)?;
        if header[11..16].iter().chain(&header[32..]).any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let Some(width) = Width::from_bits(header[10]) else {
            return corrupt(format!("factors cannot have {} bits", header[10]));
        };
        let (base_bytes, total_rank) = (size_at(header, 16)?, size_at(header, 24)?);
        let end = HEADER_BYTES.checked_add(base_bytes);
        let Some(base) = end.and_then(|end| data.get(HEADER_BYTES..end)) else {
            let message = format!(
                "compensated tensor: the group-wise tensor of {base_bytes} bytes exceeds the {} bytes",
                data.len()
            );
            return Err(Error::InsufficientData(message));
        };
        let base = groupwise::View::parse(base)?.layout();
        match Layout::of(base, width, total_rank) {
            Some(layout) if layout.total == data.len() => {
                let starts = layout.read_ranks(data)?;
                Ok((layout, starts))
            }
            Some(layout) if layout.total > data.len() => {
                let (found, total) = (data.len(), layout.total);
                let message = format!("compensated tensor: {found} bytes instead of {total}");
                Err(Error::InsufficientData(message))
            }
            _ => corrupt(format!("{} bytes contradict the shape", data.len())),
        }
    }

    /// Reads the ranks and checks that they fit the matrices and that their sum is the header's. The E entries lie in
    /// the tensor, so the allocated sums take at most twice their bytes.
    fn read_ranks(&self, data: &[u8]) -> Result<Vec<usize>> {
        let shape = self.shape();
        let most = shape.rows.min(shape.columns);
        let bytes = &data[self.ranks_at..][..4 * shape.experts];
        let mut starts = Vec::with_capacity(shape.experts + 1);
        let mut sum = 0usize;
        starts.push(sum);
        for (expert, rank) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let rank = u32::from_le_bytes(*rank) as usize;
            if rank > most || rank > self.total_rank - sum {
                return corrupt(format!("rank {rank} of expert {expert} is too large"));
            }
            sum += rank;
            starts.push(sum);
        }
        match sum == self.total_rank {
            true => Ok(starts),
            false => corrupt(format!(
                "the ranks add up to {sum} instead of {}",
                self.total_rank
            )),
        }
    }

    pub(super) fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10] = self.width.bits();
        out[16..24].copy_from_slice(&(self.base.total_bytes() as u64).to_le_bytes());
        out[24..32].copy_from_slice(&(self.total_rank as u64).to_le_bytes());
    }
}

fn size_at(header: &[u8], at: usize) -> Result<usize> {
    let mut word = [0; 8];
    word.copy_from_slice(&header[at..at + 8]);
    usize::try_from(u64::from_le_bytes(word)).map_or_else(|_| corrupt("too large for this machine"), Ok)
}
