//! Reads a packed tensor in place: a view borrows the bytes, checks the metadata once, and gives access to rows.
//!
//! [`TernaryView::parse`] reads the header, levels, index and starts but nothing of the payload, so it is cheap on a
//! mapped file. On success every row's codes lie within the payload; their validity is checked by
//! [`TernaryView::verify`] and by the decoders.

use std::ops::Range;

use super::Code;
use super::dict16::MAX_PAIRS;
use super::layout::{self, GROUP_ROWS, Header, Layout, SWAPPED};
use super::levels::{self, LevelType};
use crate::types::Shape;
use crate::{Error, Result};

/// A packed tensor over borrowed bytes.
#[derive(Debug, Clone)]
pub struct TernaryView<'a> {
    data: &'a [u8],
    header: Header,
    layout: Layout,
}

/// The parsed header and layout without a reference to the bytes, to be stored next to owned bytes.
#[derive(Debug, Clone)]
pub struct Metadata {
    header: Header,
    layout: Layout,
}

impl Metadata {
    /// The entropy code.
    pub fn code(&self) -> Code {
        self.header.code
    }

    /// The shape: experts, rows, columns, and the number of dimensions of the original tensor (2 or 3).
    pub fn shape(&self) -> Shape {
        self.header.shape
    }

    /// The number of non-zero weights according to the header.
    pub fn nonzeros(&self) -> u64 {
        self.header.nonzeros
    }

    /// The storage type of levels.
    pub fn level_type(&self) -> LevelType {
        self.header.levels.level_type
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.layout.total
    }

    /// The sections by name, with their positions.
    pub fn sections(&self) -> [(&'static str, Range<usize>); 4] {
        let Layout {
            levels,
            index,
            starts,
            payload,
            ..
        } = self.layout.clone();
        [
            ("levels", levels),
            ("index", index),
            ("starts", starts),
            ("payload", payload),
        ]
    }
}

/// The codes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row<'a> {
    /// All weights are zero; nothing is stored.
    Zero,
    /// Two bits per weight, low bits first: 0 zero, 1 negative, 2 positive.
    Raw(&'a [u8]),
    /// FSV8 codes.
    Fsv8 {
        /// The codes, one byte each.
        codes: &'a [u8],
        /// The index of the dictionary in [`TernaryView::dictionaries`].
        dictionary: usize,
        /// Whether symbol 1 stands for the positive level and 2 for the negative one, instead of the reverse.
        swapped: bool,
    },
    /// 16-bit little-endian codes of QMoE's dictionary (Frantar and Alistarh, 2023). Symbol 1 is the negative level.
    Dict16(&'a [u8]),
}

/// A row and its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedRow<'a> {
    /// The index of the row in its expert.
    pub row: usize,
    /// The offset of the row's first byte in [`TernaryView::padded_payload`].
    pub start: usize,
    /// The codes of the row.
    pub codes: Row<'a>,
}

impl<'a> TernaryView<'a> {
    /// Checks the metadata and borrows the tensor; `data` is exactly one tensor.
    ///
    /// # Errors
    /// [`Error::InsufficientData`] if the bytes end early, [`Error::Corruption`] if they contradict the format.
    pub fn parse(data: &'a [u8]) -> Result<TernaryView<'a>> {
        let header = Header::read(data)?;
        let layout = Layout::new(&header)?;
        if data.len() < layout.total {
            return Err(Error::InsufficientData(format!(
                "ternary tensor: {} bytes of {}",
                data.len(),
                layout.total
            )));
        }
        if data.len() > layout.total {
            return Err(Error::Corruption(format!(
                "ternary tensor: {} bytes instead of {}",
                data.len(),
                layout.total
            )));
        }
        let view = TernaryView { data, header, layout };
        view.check_levels()?;
        match view.header.code {
            Code::Fsv8 => view.check_tails()?,
            Code::Dict16 => view.check_row_starts()?,
        }
        Ok(view)
    }

    /// The result of parsing, for [`TernaryView::again`].
    pub fn metadata(&self) -> Metadata {
        Metadata {
            header: self.header,
            layout: self.layout.clone(),
        }
    }

    /// A view of bytes that have been parsed before, at no cost.
    ///
    /// The bytes must be those that [`TernaryView::parse`] accepted. With other bytes methods may panic, but never
    /// read outside `data`, because every access is checked against its length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the number of bytes differs.
    pub fn again(data: &'a [u8], metadata: &Metadata) -> Result<TernaryView<'a>> {
        let Metadata { header, layout } = metadata.clone();
        if data.len() != layout.total {
            return Err(Error::InvalidArgument(
                "ternary tensor: the bytes differ from the parsed ones".into(),
            ));
        }
        Ok(TernaryView { data, header, layout })
    }

    /// The entropy code.
    pub fn code(&self) -> Code {
        self.header.code
    }

    /// The shape: experts, rows, columns, and the number of dimensions of the original tensor (2 or 3).
    pub fn shape(&self) -> Shape {
        self.header.shape
    }

    /// The number of experts; 1 for a matrix.
    pub fn experts(&self) -> usize {
        self.header.shape.experts
    }

    /// The number of rows of each expert.
    pub fn rows(&self) -> usize {
        self.header.shape.rows
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.header.shape.columns
    }

    /// The number of non-zero weights according to the header.
    pub fn nonzeros(&self) -> u64 {
        self.header.nonzeros
    }

    /// The storage type of levels.
    pub fn level_type(&self) -> LevelType {
        self.header.levels.level_type
    }

    /// The ids of the dictionaries that rows choose from; empty for dict16.
    #[inline]
    pub fn dictionaries(&self) -> &[u8] {
        &self.header.dictionary_ids[..usize::from(self.header.dictionary_count)]
    }

    /// The bytes of the whole tensor.
    pub fn bytes(&self) -> &'a [u8] {
        self.data
    }

    /// The size of the codes in bytes.
    pub fn payload_bytes(&self) -> usize {
        self.layout.payload.len()
    }

    /// The codes of all rows and the padding after them, at least 64 bytes.
    #[inline]
    pub fn padded_payload(&self) -> &'a [u8] {
        &self.data[self.layout.payload.start..]
    }

    /// The (negative, positive) levels of the row with the global index `expert * rows() + row`.
    #[inline(always)]
    pub fn levels(&self, row: usize) -> (f32, f32) {
        self.header
            .levels
            .read(&self.data[self.layout.levels.clone()], row)
    }

    /// The number of groups of at most 64 rows in an expert.
    pub fn groups(&self) -> usize {
        layout::row_groups(&self.header.shape)
    }

    /// The codes of consecutive row groups of an expert.
    ///
    /// # Panics
    /// If the expert or a group does not exist.
    pub fn codes(&self, expert: usize, groups: Range<usize>) -> &'a [u8] {
        assert!(expert < self.experts() && groups.start <= groups.end && groups.end <= self.groups());
        let start = |group: usize| match self.header.code {
            Code::Fsv8 => self.start(expert * self.groups() + group),
            Code::Dict16 if group < self.groups() => {
                let row = self.index_entry(expert, group * GROUP_ROWS) as usize;
                2 * (self.start(expert) + row)
            }
            Code::Dict16 => 2 * self.start(expert + 1),
        };
        &self.payload()[start(groups.start)..start(groups.end)]
    }

    /// The rows of a group in order. Cheaper than calling [`TernaryView::row`] for each, which adds up the lengths of
    /// all previous rows of the group.
    ///
    /// # Panics
    /// If the expert or the group does not exist.
    #[inline]
    pub fn group_rows(&self, expert: usize, group: usize) -> impl Iterator<Item = PlacedRow<'a>> + '_ {
        assert!(expert < self.experts() && group < self.groups());
        let first = group * GROUP_ROWS;
        let rows = first..(first + GROUP_ROWS).min(self.rows());
        let mut at = match self.header.code {
            Code::Fsv8 => self.start(expert * self.groups() + group),
            Code::Dict16 => 0,
        };
        rows.map(move |row| match self.header.code {
            Code::Fsv8 => {
                let start = at;
                let codes = self.fsv8_row(expert, row, start);
                at += codes.bytes().len();
                PlacedRow { row, start, codes }
            }
            Code::Dict16 => self.dict16_row(expert, row),
        })
    }

    /// The start of a group's first FSV8 row in [`TernaryView::padded_payload`], and the length in bytes and the
    /// dictionary field (0 for raw rows) of each row. Cheaper than [`TernaryView::group_rows`], for kernels.
    ///
    /// # Panics
    /// If the expert or the group does not exist, or the code is not FSV8.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn fsv8_tails(
        &self,
        expert: usize,
        group: usize,
    ) -> (usize, impl Iterator<Item = (usize, u32)>) {
        assert!(self.header.code == Code::Fsv8 && expert < self.experts() && group < self.groups());
        let first = group * GROUP_ROWS;
        let rows = GROUP_ROWS.min(self.rows() - first);
        let tail = self.header.tail();
        let index = &self.data[self.layout.index.clone()][(expert * self.rows() + first) * tail.bytes..];
        let tails = index[..rows * tail.bytes].chunks_exact(tail.bytes);
        let start = self.start(expert * self.groups() + group);
        (start, tails.map(move |entry| tail.split(tail.read(entry, 0))))
    }

    /// The codes of one row.
    ///
    /// # Panics
    /// If the expert or the row does not exist.
    pub fn row(&self, expert: usize, row: usize) -> Row<'a> {
        assert!(expert < self.experts() && row < self.rows());
        match self.header.code {
            Code::Dict16 => self.dict16_row(expert, row).codes,
            Code::Fsv8 => {
                let group = row / GROUP_ROWS;
                let start = self.start(expert * self.groups() + group);
                let before: usize = (group * GROUP_ROWS..row).map(|r| self.tail(expert, r).0).sum();
                self.fsv8_row(expert, row, start + before)
            }
        }
    }

    #[inline(always)]
    fn index_entry(&self, expert: usize, row: usize) -> u32 {
        self.header
            .tail()
            .read(&self.data[self.layout.index.clone()], expert * self.rows() + row)
    }

    /// The length and the dictionary field of an FSV8 row.
    #[inline(always)]
    fn tail(&self, expert: usize, row: usize) -> (usize, u32) {
        self.header.tail().split(self.index_entry(expert, row))
    }

    /// An entry of the section `starts`. [`TernaryView::parse`] has checked that all fit the payload.
    #[inline]
    fn start(&self, i: usize) -> usize {
        let mut word = [0; 8];
        word.copy_from_slice(&self.data[self.layout.starts.clone()][8 * i..][..8]);
        usize::try_from(u64::from_le_bytes(word)).unwrap_or(usize::MAX)
    }

    #[inline]
    fn payload(&self) -> &'a [u8] {
        &self.data[self.layout.payload.clone()]
    }

    #[inline(always)]
    fn fsv8_row(&self, expert: usize, row: usize, start: usize) -> Row<'a> {
        let (length, field) = self.tail(expert, row);
        let codes = &self.payload()[start..start + length];
        match length {
            0 => Row::Zero,
            _ if length == layout::raw_bytes(self.header.shape.columns) => Row::Raw(codes),
            _ => Row::Fsv8 {
                codes,
                dictionary: (field & !SWAPPED) as usize,
                swapped: field & SWAPPED != 0,
            },
        }
    }

    #[inline]
    fn dict16_row(&self, expert: usize, row: usize) -> PlacedRow<'a> {
        let base = self.start(expert);
        let start = base + self.index_entry(expert, row) as usize;
        let end = match row + 1 {
            next if next < self.rows() => base + self.index_entry(expert, next) as usize,
            _ => self.start(expert + 1),
        };
        PlacedRow {
            row,
            start: 2 * start,
            codes: Row::Dict16(&self.payload()[2 * start..2 * end]),
        }
    }

    fn check_levels(&self) -> Result<()> {
        let rows = self.experts() * self.rows();
        match (0..rows).find(|&row| !levels::valid(self.levels(row))) {
            Some(row) => self.corrupt_row(
                row,
                "its levels are not finite with negative <= 0 <= positive".into(),
            ),
            None => Ok(()),
        }
    }

    fn corrupt_row<T>(&self, row: usize, what: String) -> Result<T> {
        let (expert, row) = (row / self.rows(), row % self.rows());
        Err(Error::Corruption(format!(
            "ternary tensor: expert {expert}, row {row}: {what}"
        )))
    }

    /// Checks that the rows of each group end where the next group starts, by the lengths in the rows' tails.
    fn check_tails(&self) -> Result<()> {
        let mut at = 0;
        for unit in 0..self.experts() * self.groups() {
            let (expert, group) = (unit / self.groups(), unit % self.groups());
            self.check_start(unit, at)?;
            for row in group * GROUP_ROWS..((group + 1) * GROUP_ROWS).min(self.rows()) {
                at += self.checked_tail(expert, row)?;
            }
        }
        self.check_start(self.experts() * self.groups(), at)?;
        if at != self.payload_bytes() {
            return Err(Error::Corruption(
                "ternary tensor: rows and payload differ in length".into(),
            ));
        }
        Ok(())
    }

    fn check_start(&self, i: usize, expected: usize) -> Result<()> {
        match self.start(i) {
            start if start == expected => Ok(()),
            start => Err(Error::Corruption(format!(
                "ternary tensor: row group {i} starts at byte {start} of the payload instead of {expected}"
            ))),
        }
    }

    fn checked_tail(&self, expert: usize, row: usize) -> Result<usize> {
        let (length, field) = self.tail(expert, row);
        let raw_bytes = layout::raw_bytes(self.header.shape.columns);
        let all_row = expert * self.rows() + row;
        if length > raw_bytes {
            return self.corrupt_row(
                all_row,
                format!("its {length} bytes exceed the {raw_bytes} of a raw row"),
            );
        }
        let coded = length != 0 && length != raw_bytes;
        if (coded && (field & !SWAPPED) as usize >= self.dictionaries().len()) || (!coded && field != 0) {
            return self.corrupt_row(all_row, format!("invalid dictionary field {field}"));
        }
        Ok(length)
    }

    /// Checks the row starts of dict16 against the expert starts.
    fn check_row_starts(&self) -> Result<()> {
        let codes = self.payload_bytes() / 2;
        let last = self.start(self.experts());
        if self.start(0) != 0 || !self.payload_bytes().is_multiple_of(2) || last != codes {
            return Err(Error::Corruption(
                "ternary tensor: expert starts and payload differ".into(),
            ));
        }
        for expert in 0..self.experts() {
            let (start, end) = (self.start(expert), self.start(expert + 1));
            if start > end || end > codes || (self.rows() == 0 && start != end) {
                return Err(Error::Corruption(format!(
                    "ternary tensor: expert {expert} has no valid start"
                )));
            }
            let mut before = 0;
            for row in 0..self.rows() {
                let at = self.index_entry(expert, row) as usize;
                if at < before || at > end - start || (row == 0 && at != 0) {
                    return self
                        .corrupt_row(expert * self.rows() + row, format!("invalid start at code {at}"));
                }
                self.check_dict16_length(expert, row, at - before)?;
                before = at;
            }
            self.check_dict16_length(expert, self.rows(), end - start - before)?;
        }
        Ok(())
    }

    /// Checks that the `codes` of the row before `row` suffice for its columns, so that a small file cannot claim
    /// many columns. A row of zeros may have no codes.
    fn check_dict16_length(&self, expert: usize, row: usize, codes: usize) -> Result<()> {
        if codes > 0 && codes.saturating_mul(2 * MAX_PAIRS) < self.columns() {
            return self.corrupt_row(
                expert * self.rows() + row.saturating_sub(1),
                format!("its {codes} codes are too few for {} columns", self.columns()),
            );
        }
        Ok(())
    }

    /// Checks that the bytes between the sections are zero.
    pub(super) fn check_padding(&self) -> Result<()> {
        let Layout {
            levels,
            index,
            starts,
            payload,
            total,
        } = &self.layout;
        let gaps = [
            layout::HEADER_BYTES..levels.start,
            levels.end..index.start,
            index.end..starts.start,
            starts.end..payload.start,
            payload.end..*total,
        ];
        for gap in gaps {
            if let Some(at) = gap.clone().find(|&at| self.data[at] != 0) {
                return Err(Error::Corruption(format!(
                    "ternary tensor: padding byte {at} is not zero"
                )));
            }
        }
        Ok(())
    }
}

impl<'a> Row<'a> {
    /// The stored bytes.
    pub fn bytes(&self) -> &'a [u8] {
        match *self {
            Row::Zero => &[],
            Row::Raw(bytes) | Row::Dict16(bytes) | Row::Fsv8 { codes: bytes, .. } => bytes,
        }
    }
}
