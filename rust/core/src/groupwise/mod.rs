//! Group-wise integer tensors: 2-bit codes, and a scale and an offset for each group of columns.
//!
//! A weight is `scale * code + offset`. Two bits a weight leave an entropy coder little: the ranges of groups are chosen
//! so that all four codes are in use, so the format is fixed-width and read in place.
//!
//! ```text
//!  0 8s magic "MOEPGRPW"    11 u8 parameter dtype (1 f16)    16 u64 experts E    40 u64 group size in columns
//!  8 u16 version 1          12 u8 rank 2 or 3                24 u64 rows R       48 80 zeros
//! 10 u8 bits (2)            13 3 zeros                       32 u64 columns C
//! parameters   E*R*G pairs (scale, offset), f16, G = ceil(C / group size)
//! codes        E*R rows of ceil(C / 64) * 16 bytes; four weights a byte, low bits first, zeros after the last column
//! ```
//!
//! Both sections start at multiples of 64, and the tensor ends at a multiple of 64. The group size is a multiple of 64,
//! so that 16 bytes of codes never straddle groups; a group of a whole row is written as C rounded up to 64.
//!
//! [`View::parse`] checks the header and the size and nothing else: it is cheap on a mapped file, and no code and no
//! parameter can make a reader leave the tensor. [`View::verify`] checks parameters and padding.

use rayon::prelude::*;

use crate::ternary::Shape;
use crate::{Error, Result, limits};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPGRPW";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;
/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;
/// Columns that kernels take at a time; their codes are [`CHUNK_BYTES`].
pub const CHUNK: usize = 64;
/// Bytes of the codes of [`CHUNK`] columns.
pub const CHUNK_BYTES: usize = CHUNK / 4;

const ALIGNMENT: usize = 64;
const BITS: u8 = 2;
const F16: u8 = 1;

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("group-wise tensor: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("group-wise tensor: {what}")))
}

/// Shape and places of a tensor, everything derived from the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    group: usize,
    codes_at: usize,
    total: usize,
}

impl Layout {
    /// The layout of a shape, or `None` where its size overflows.
    fn of(shape: Shape, group: usize) -> Option<Layout> {
        let rows = shape.experts.checked_mul(shape.rows)?;
        let parameters = rows.checked_mul(shape.columns.div_ceil(group))?.checked_mul(4)?;
        let codes = rows.checked_mul(shape.columns.div_ceil(CHUNK).checked_mul(CHUNK_BYTES)?)?;
        let codes_at = HEADER_BYTES
            .checked_add(parameters)?
            .checked_next_multiple_of(ALIGNMENT)?;
        let total = codes_at.checked_add(codes)?.checked_next_multiple_of(ALIGNMENT)?;
        isize::try_from(total).ok()?;
        Some(Layout {
            shape,
            group,
            codes_at,
            total,
        })
    }

    /// Experts, rows, columns and rank.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Columns that share a scale and an offset.
    pub fn group_size(&self) -> usize {
        self.group
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.shape.columns.div_ceil(self.group)
    }

    /// Bits of a code.
    pub fn bits(&self) -> u8 {
        BITS
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// Bytes of a row's codes.
    fn row_bytes(&self) -> usize {
        self.shape.columns.div_ceil(CHUNK) * CHUNK_BYTES
    }

    fn read(data: &[u8]) -> Result<Layout> {
        let Some(header) = data.get(..HEADER_BYTES) else {
            let message = format!("group-wise tensor: {} bytes hold no header", data.len());
            return Err(Error::InsufficientData(message));
        };
        if header[..8] != MAGIC {
            return corrupt("wrong magic");
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION || header[10] != BITS || header[11] != F16 {
            return corrupt(format!(
                "version {version}, {} bits, parameter type {}",
                header[10], header[11]
            ));
        }
        if header[13..16].iter().chain(&header[48..]).any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let shape = Shape {
            experts: dimension(header, 16, limits::MAX_ROWS)?,
            rows: dimension(header, 24, limits::MAX_ROWS)?,
            columns: dimension(header, 32, limits::MAX_COLUMNS)?,
            rank: header[12],
        };
        let group = dimension(header, 40, limits::MAX_COLUMNS + CHUNK as u64)?;
        if !matches!((shape.rank, shape.experts), (2, 1) | (3, _))
            || group == 0
            || !group.is_multiple_of(CHUNK)
        {
            return corrupt(format!(
                "rank {} of {} experts, groups of {group}",
                shape.rank, shape.experts
            ));
        }
        match Layout::of(shape, group) {
            Some(layout) if layout.total == data.len() => Ok(layout),
            Some(layout) if layout.total > data.len() => {
                let message = format!(
                    "group-wise tensor: {} bytes instead of {}",
                    data.len(),
                    layout.total
                );
                Err(Error::InsufficientData(message))
            }
            _ => corrupt(format!("{} bytes contradict the shape", data.len())),
        }
    }

    fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10..13].copy_from_slice(&[BITS, F16, self.shape.rank]);
        let sizes = [
            self.shape.experts,
            self.shape.rows,
            self.shape.columns,
            self.group,
        ];
        for (field, size) in out[16..48].chunks_exact_mut(8).zip(sizes) {
            field.copy_from_slice(&(size as u64).to_le_bytes());
        }
    }
}

fn dimension(header: &[u8], at: usize, limit: u64) -> Result<usize> {
    let mut word = [0; 8];
    word.copy_from_slice(&header[at..at + 8]);
    match u64::from_le_bytes(word) {
        size if size <= limit => {
            usize::try_from(size).map_or_else(|_| corrupt("too large for this machine"), Ok)
        }
        size => corrupt(format!("the size {size} is beyond {limit}")),
    }
}

fn half_at(bytes: &[u8], index: usize) -> f32 {
    half::f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
}

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
    /// [`Error::Corruption`] or [`Error::InsufficientData`]: the bytes are no such tensor.
    pub fn parse(data: &'a [u8]) -> Result<View<'a>> {
        let layout = Layout::read(data)?;
        Ok(View { data, layout })
    }

    /// Shape and group size.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The codes of row `row` of all experts' rows, padded to whole chunks.
    pub fn row_codes(&self, row: usize) -> &'a [u8] {
        let bytes = self.layout.row_bytes();
        &self.data[self.layout.codes_at + row * bytes..][..bytes]
    }

    /// Scale and offset of a group of a row.
    #[inline]
    pub fn parameters(&self, row: usize, group: usize) -> (f32, f32) {
        let at = 2 * (row * self.layout.groups() + group);
        let bytes = &self.data[HEADER_BYTES..self.layout.codes_at];
        (half_at(bytes, at), half_at(bytes, at + 1))
    }

    /// The codes of a row, `[C]`.
    pub fn decode_row(&self, row: usize, codes: &mut [u8]) {
        let bytes = self.row_codes(row);
        codes
            .iter_mut()
            .enumerate()
            .for_each(|(c, code)| *code = bytes[c / 4] >> (2 * (c % 4)) & 3);
    }

    /// The values of a row, `[C]`: scale * code + offset, each operation rounded to f32.
    pub fn decode_values(&self, row: usize, values: &mut [f32]) {
        let bytes = self.row_codes(row);
        for (group, values) in values.chunks_mut(self.layout.group).enumerate() {
            let (scale, offset) = self.parameters(row, group);
            let first = group * self.layout.group;
            for (c, value) in (first..).zip(values) {
                *value = scale * f32::from(bytes[c / 4] >> (2 * (c % 4)) & 3) + offset;
            }
        }
    }

    /// Checks that parameters are finite and scales not negative, and that all padding is zero.
    ///
    /// # Errors
    /// [`Error::Corruption`] that names expert and row.
    pub fn verify(&self) -> Result<()> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.layout.shape;
        let parameters_end = HEADER_BYTES + 4 * experts * rows * self.layout.groups();
        let codes_end = self.layout.codes_at + experts * rows * self.layout.row_bytes();
        let gaps = [parameters_end..self.layout.codes_at, codes_end..self.layout.total];
        if gaps.into_iter().any(|gap| self.data[gap].iter().any(|&b| b != 0)) {
            return corrupt("padding is not zero");
        }
        for row in 0..experts * rows {
            let place = || format!("expert {} row {}", row / rows, row % rows);
            for group in 0..self.layout.groups() {
                let (scale, offset) = self.parameters(row, group);
                if !scale.is_finite() || scale < 0.0 || !offset.is_finite() {
                    return corrupt(format!(
                        "{}: scale {scale}, offset {offset} of group {group}",
                        place()
                    ));
                }
            }
            let codes = self.row_codes(row);
            let partial = codes.get(columns / 4).map_or(0, |b| b >> (2 * (columns % 4)));
            if partial != 0 || codes.iter().skip(columns / 4 + 1).any(|&b| b != 0) {
                return corrupt(format!("{}: codes behind the last column", place()));
            }
        }
        Ok(())
    }
}

/// Packs codes and parameters.
///
/// `codes` is E x R x C of 0 to 3, `parameters` E x R x G pairs (scale, offset); they must be f16 values. `group` is a
/// multiple of 64 columns; a larger group than the row has columns means one group a row.
///
/// # Errors
/// [`Error::InvalidArgument`]: a size, code or parameter is out of range.
pub fn encode(
    codes: &[u8],
    parameters: &[f32],
    shape: Shape,
    group: usize,
    pool: &rayon::ThreadPool,
) -> Result<Vec<u8>> {
    if !matches!((shape.rank, shape.experts), (2, 1) | (3, _)) || group == 0 || !group.is_multiple_of(CHUNK) {
        return invalid(format!(
            "rank {} of {} experts, groups of {group} columns",
            shape.rank, shape.experts
        ));
    }
    let group = group.min(shape.columns.max(1).next_multiple_of(CHUNK));
    let rows = shape.experts as u64 * shape.rows as u64;
    let Some(layout) = Layout::of(shape, group).filter(|_| rows <= limits::MAX_ROWS * limits::MAX_ROWS)
    else {
        return invalid("the shape is too large");
    };
    let rows = shape.experts * shape.rows;
    if codes.len() != rows * shape.columns || parameters.len() != 2 * rows * layout.groups() {
        return invalid(format!(
            "{} codes and {} parameters for {shape:?}",
            codes.len(),
            parameters.len()
        ));
    }
    if let Some(at) = codes.iter().position(|&code| code > 3) {
        return invalid(format!("code {} in row {}", codes[at], at / shape.columns));
    }
    let mut out = vec![0; layout.total];
    layout.write(&mut out);
    for (at, (field, &value)) in out[HEADER_BYTES..]
        .chunks_exact_mut(2)
        .zip(parameters)
        .enumerate()
    {
        let stored = half::f16::from_f32(value);
        if stored.to_f32() != value || (at % 2 == 0 && value < 0.0) {
            return invalid(format!(
                "parameter {value} is no f16, infinite, or a negative scale"
            ));
        }
        if !value.is_finite() {
            return invalid(format!("parameter {value}"));
        }
        field.copy_from_slice(&stored.to_le_bytes());
    }
    if shape.columns > 0 {
        let rows = out[layout.codes_at..].par_chunks_exact_mut(layout.row_bytes());
        pool.install(|| {
            rows.zip(codes.par_chunks_exact(shape.columns))
                .for_each(|(out, codes)| pack(codes, out))
        });
    }
    Ok(out)
}

fn pack(codes: &[u8], out: &mut [u8]) {
    for (byte, four) in out.iter_mut().zip(codes.chunks(4)) {
        *byte = four
            .iter()
            .enumerate()
            .fold(0, |byte, (i, code)| byte | code << (2 * i));
    }
}

#[cfg(test)]
pub(crate) mod tests;
