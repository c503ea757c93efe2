//! The byte layout of a packed ternary tensor: a header of 128 bytes and four sections, whose offsets follow from it.
//!
//! ```text
//!  0 8s magic "MOEPTERN"     10 u8 code (0 fsv8, 1 dict16)           22 u8 symmetric levels  48 u64 payload bytes
//!  8 u16 version 1           11 u8 level dtype (0 bf16 1 f16 2 f32)  23 u8 zero              56 u64 non-zero codes
//!                            12 u8 ndim 2 or 3                       24 u64 experts E        64 64 zeros
//!                            13 u8 number of dictionaries            32 u64 rows R
//!                            14 8 x u8 dictionary ids, ascending     40 u64 columns C
//! levels   E*R pairs (negative, positive), or only the positive ones if symmetric
//! index    fsv8: a tail per row, length | dictionary << k: u16, k = 12 if a raw row has at most 4095 bytes, else u32, k = 28
//!          dict16: u32 per row, its start in codes from its expert's start
//! starts   u64; fsv8: of every group of 64 rows in bytes, and the end; dict16: of every expert in codes, and the end
//! payload  the codes of the rows back to back
//! ```
//!
//! Sections start at multiples of 64; the tensor ends at a multiple of 64 with at least 64 zeros after the payload,
//! so that a kernel may read whole vectors. Offsets are derived, not stored, so they cannot be inconsistent.

use std::ops::Range;

use super::Code;
use super::levels::{LevelStorage, LevelType};
use crate::types::Shape;
use crate::{Error, Result, limits};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPTERN";

/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;

/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;

/// The alignment of sections, and the minimum number of zeros after the payload.
pub const ALIGNMENT: usize = 64;

/// The rows of a row group. The offset of each group's first code is stored.
pub const GROUP_ROWS: usize = 64;

/// The maximum number of dictionaries of a tensor.
pub const MAX_DICTIONARIES: usize = 8;

/// The bit of a tail's dictionary field that marks swapped levels.
pub(crate) const SWAPPED: u32 = 8;

/// The number of row groups of an expert; the last one may have fewer than 64 rows.
pub(crate) fn row_groups(shape: &Shape) -> usize {
    shape.rows.div_ceil(GROUP_ROWS)
}

/// The size of a raw row, 2 bits per weight: no row takes more bytes.
pub(crate) fn raw_bytes(columns: usize) -> usize {
    columns.div_ceil(4)
}

/// The decoded header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub shape: Shape,
    pub code: Code,
    pub levels: LevelStorage,
    pub dictionary_count: u8,
    pub dictionary_ids: [u8; MAX_DICTIONARIES],
    pub payload_bytes: u64,
    pub nonzeros: u64,
}

fn corrupt<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Corruption(format!("ternary tensor: {}", what.into())))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Header {
    /// Reads and checks the first 128 bytes.
    pub fn read(data: &[u8]) -> Result<Header> {
        let Some(bytes) = data.get(..HEADER_BYTES) else {
            return Err(Error::InsufficientData(format!(
                "ternary tensor: {} bytes are too few for a header",
                data.len()
            )));
        };
        if bytes[..8] != MAGIC {
            return corrupt("wrong magic");
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return corrupt(format!("version {version} is not supported"));
        }
        if bytes[22] > 1 || bytes[23] != 0 || bytes[64..].iter().any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let shape = Shape {
            experts: dimension(u64_at(bytes, 24), limits::MAX_ROWS, "experts")?,
            rows: dimension(u64_at(bytes, 32), limits::MAX_ROWS, "rows")?,
            columns: dimension(u64_at(bytes, 40), limits::MAX_COLUMNS, "columns")?,
            ndim: bytes[12],
        };
        let mut dictionary_ids = [0; MAX_DICTIONARIES];
        dictionary_ids.copy_from_slice(&bytes[14..22]);
        let header = Header {
            shape,
            code: Code::from_id(bytes[10]).map_or_else(|| corrupt("unknown code"), Ok)?,
            levels: LevelStorage {
                level_type: LevelType::from_id(bytes[11])
                    .map_or_else(|| corrupt("unknown level dtype"), Ok)?,
                symmetric: bytes[22] == 1,
            },
            dictionary_count: bytes[13],
            dictionary_ids,
            payload_bytes: u64_at(bytes, 48),
            nonzeros: u64_at(bytes, 56),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        if !self.shape.has_valid_ndim() {
            return corrupt(format!(
                "ndim {} does not fit {} experts",
                self.shape.ndim, self.shape.experts
            ));
        }
        if self
            .shape
            .weights()
            .is_none_or(|weights| self.nonzeros > weights as u64)
        {
            return corrupt("shape and number of non-zeros contradict each other");
        }
        let count = usize::from(self.dictionary_count);
        let counted = match self.code {
            Code::Fsv8 => (1..=MAX_DICTIONARIES).contains(&count),
            Code::Dict16 => count == 0,
        };
        if !counted {
            return corrupt(format!("invalid number of dictionaries: {count}"));
        }
        let (used, unused) = self.dictionary_ids.split_at(count);
        let ascending = used.is_sorted_by(|a, b| a < b);
        let known = used.iter().all(|&id| usize::from(id) < super::fsv8::COUNT);
        if !ascending || !known || unused.iter().any(|&id| id != 0) {
            return corrupt("invalid dictionary ids");
        }
        Ok(())
    }

    /// Writes the first 128 bytes.
    pub fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10..14].copy_from_slice(&[
            self.code.id(),
            self.levels.level_type.id(),
            self.shape.ndim,
            self.dictionary_count,
        ]);
        out[14..22].copy_from_slice(&self.dictionary_ids);
        out[22] = u8::from(self.levels.symmetric);
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape;
        let words = [
            experts as u64,
            rows as u64,
            columns as u64,
            self.payload_bytes,
            self.nonzeros,
        ];
        for (place, word) in out[24..64].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn dimension(value: u64, limit: u64, name: &str) -> Result<usize> {
    if value > limit {
        return corrupt(format!("{value} {name} exceed the limit of {limit}"));
    }
    usize::try_from(value).or_else(|_| corrupt(format!("{value} {name} do not fit this machine")))
}

/// The positions of the sections of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub levels: Range<usize>,
    pub index: Range<usize>,
    pub starts: Range<usize>,
    pub payload: Range<usize>,
    /// The length of the whole tensor.
    pub total: usize,
}

impl Layout {
    /// Derives the ranges of all sections; fails only if they do not fit the address space.
    pub fn new(header: &Header) -> Result<Layout> {
        let place = || {
            let rows = header.shape.all_rows()?;
            let start_count = match header.code {
                Code::Fsv8 => header
                    .shape
                    .experts
                    .checked_mul(row_groups(&header.shape))?
                    .checked_add(1)?,
                Code::Dict16 => header.shape.experts.checked_add(1)?,
            };
            let levels = section(HEADER_BYTES, rows.checked_mul(header.levels.bytes())?)?;
            let index = section(levels.end, rows.checked_mul(header.tail().bytes)?)?;
            let starts = section(index.end, start_count.checked_mul(8)?)?;
            let payload = section(starts.end, usize::try_from(header.payload_bytes).ok()?)?;
            let total = payload
                .end
                .checked_add(ALIGNMENT)?
                .checked_next_multiple_of(ALIGNMENT)?;
            isize::try_from(total).ok()?;
            Some(Layout {
                levels,
                index,
                starts,
                payload,
                total,
            })
        };
        place().map_or_else(|| corrupt("its size does not fit this machine"), Ok)
    }
}

fn section(after: usize, bytes: usize) -> Option<Range<usize>> {
    let start = after.checked_next_multiple_of(ALIGNMENT)?;
    Some(start..start.checked_add(bytes)?)
}

/// The stored form of tails, the entries of the index: their width and, for FSV8, the bit where the dictionary field
/// begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TailLayout {
    pub bytes: usize,
    pub shift: u32,
}

impl TailLayout {
    /// Reads the `i`-th entry of the index.
    #[inline]
    pub fn read(self, index: &[u8], i: usize) -> u32 {
        let at = i * self.bytes;
        if self.bytes == 2 {
            u32::from(u16::from_le_bytes([index[at], index[at + 1]]))
        } else {
            u32::from_le_bytes([index[at], index[at + 1], index[at + 2], index[at + 3]])
        }
    }

    /// Writes an entry.
    pub fn write(self, value: u32, place: &mut [u8]) {
        place.copy_from_slice(&value.to_le_bytes()[..self.bytes]);
    }

    /// Splits an entry of FSV8 into the length in bytes and the dictionary field.
    #[inline]
    pub fn split(self, tail: u32) -> (usize, u32) {
        ((tail & ((1 << self.shift) - 1)) as usize, tail >> self.shift)
    }
}

impl Header {
    /// The stored form of the index entries.
    pub fn tail(&self) -> TailLayout {
        match self.code {
            Code::Fsv8 if raw_bytes(self.shape.columns) <= 4095 => TailLayout { bytes: 2, shift: 12 },
            _ => TailLayout { bytes: 4, shift: 28 },
        }
    }
}

/// The contents of all sections of a tensor, ready to be written.
pub(super) struct Sections<'a> {
    pub shape: Shape,
    pub code: Code,
    pub dictionaries: &'a [u8],
    pub levels: &'a [(f32, f32)],
    /// The index entries of all rows.
    pub index: Vec<u32>,
    /// The entries of the section `starts`.
    pub starts: Vec<u64>,
    /// The codes of all rows as consecutive pieces of any lengths.
    pub payload: &'a [Vec<u8>],
    pub nonzeros: u64,
}

impl Sections<'_> {
    /// The bytes of the tensor.
    pub fn write(&self) -> Result<Vec<u8>> {
        let mut dictionary_ids = [0; MAX_DICTIONARIES];
        dictionary_ids[..self.dictionaries.len()].copy_from_slice(self.dictionaries);
        let header = Header {
            shape: self.shape,
            code: self.code,
            levels: LevelStorage::smallest(self.levels),
            dictionary_count: self.dictionaries.len() as u8,
            dictionary_ids,
            payload_bytes: self.payload.iter().map(|piece| piece.len() as u64).sum(),
            nonzeros: self.nonzeros,
        };
        let layout = Layout::new(&header)?;
        let mut out = vec![0; layout.total];
        header.write(&mut out);
        header.levels.write(self.levels, &mut out[layout.levels]);
        let tail = header.tail();
        for (place, &entry) in out[layout.index].chunks_exact_mut(tail.bytes).zip(&self.index) {
            tail.write(entry, place);
        }
        for (place, start) in out[layout.starts].chunks_exact_mut(8).zip(&self.starts) {
            place.copy_from_slice(&start.to_le_bytes());
        }
        let mut at = layout.payload.start;
        for piece in self.payload {
            out[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        Ok(out)
    }
}
