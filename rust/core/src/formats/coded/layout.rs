//! The header, and the offsets of all sections.

use std::ops::Range;

use super::column_scales::ColumnScales;
use super::symbols::Symbols;
use super::{BLOCK_ROWS, LANES, MAGIC, MAX_COLUMNS, MAX_LOW_BITS, QUAD, VERSION, corrupt, invalid};
use crate::Result;
use crate::formats::header;
use crate::limits::MAX_ROWS;
use crate::types::Shape;

/// The length of the header in bytes.
pub(super) const HEADER_BYTES: usize = 64;
/// The alignment of sections in bytes.
pub(super) const ALIGNMENT: usize = 64;
/// The bytes of a stream's states.
pub(super) const STATE_BYTES: usize = 2 * LANES;
/// The maximum number of tables.
pub(super) const MAX_TABLES: usize = 64;
/// The bytes of a bit plane of a register.
pub(super) const PLANE: usize = LANES / 8;
/// The maximum number of columns for which a stream codes four row blocks. The states' overhead is 48 bits per row if
/// a stream codes one block and 12 if it codes four, 0.3% of 2,048 columns of 2 bits.
const NARROW: usize = 2048;

/// The positions of the sections of a tensor, in order.
#[derive(Debug, Clone)]
pub(super) struct Sections {
    pub tables: Range<usize>,
    pub scales: Range<usize>,
    pub columns: Range<usize>,
    pub index: Range<usize>,
    pub exceptions: Range<usize>,
    pub payload: Range<usize>,
}

impl Sections {
    /// The end of each section.
    pub fn ends(&self) -> [usize; 6] {
        [
            &self.tables,
            &self.scales,
            &self.columns,
            &self.index,
            &self.exceptions,
            &self.payload,
        ]
        .map(|section| section.end)
    }
}

/// The contents of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub(super) shape: Shape,
    /// The row blocks of a stream, 1 or 4.
    pub(super) blocks: usize,
    /// Whether each row has a scale.
    pub(super) row_scales: bool,
    /// The kind of column scales.
    pub(super) column_scales: ColumnScales,
    /// Whether scales are f32; otherwise they are bf16.
    pub(super) wide_scales: bool,
    pub(super) tables: usize,
    /// The symbols of a table.
    pub(super) table_symbols: usize,
    pub(super) payload: usize,
    pub(super) exceptions: usize,
    /// The bytes of an index entry, 4 or 8.
    pub(super) entry: usize,
    /// The bytes of an exception, 4 or 8.
    pub(super) exception: usize,
    /// What symbols stand for.
    pub(super) symbols: Symbols,
}

impl Layout {
    /// The layout of a tensor before its contents are known. Streams have `stream_rows` rows; the default depends on
    /// the columns.
    pub(super) fn new(shape: Shape, stream_rows: Option<usize>, symbols: Symbols) -> Result<Layout> {
        if symbols.low_bits() > MAX_LOW_BITS {
            let low_bits = symbols.low_bits();
            return invalid(format!(
                "a code has at most {MAX_LOW_BITS} low bits, not {low_bits}"
            ));
        }
        let blocks = match stream_rows {
            None if shape.columns <= NARROW => 4,
            None | Some(16) => 1,
            Some(64) => 4,
            Some(rows) => return invalid(format!("streams have 16 or 64 rows, not {rows}")),
        };
        let layout = Layout {
            shape,
            blocks,
            row_scales: false,
            column_scales: ColumnScales::None,
            wide_scales: false,
            tables: 1,
            table_symbols: 2,
            payload: 0,
            exceptions: 0,
            entry: 4,
            exception: 4,
            symbols,
        };
        match layout.is_valid() {
            true => Ok(layout),
            false => invalid(format!("{shape:?} is not a valid shape")),
        }
    }

    /// Experts, rows, columns and ndim.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The rows of a stream, 16 or 64.
    pub fn stream_rows(&self) -> usize {
        self.blocks * BLOCK_ROWS
    }

    /// The row blocks of a stream, 1 or 4.
    pub fn stream_blocks(&self) -> usize {
        self.blocks
    }

    /// The streams of an expert.
    pub fn streams(&self) -> usize {
        match self.shape.columns {
            0 => 0,
            _ => self.shape.rows.div_ceil(self.stream_rows()),
        }
    }

    /// The registers of a row block.
    pub fn quads(&self) -> usize {
        self.shape.columns.div_ceil(QUAD)
    }

    /// The rows of a row block in an expert's stream, at most 16; zero for blocks after the last row.
    pub fn rows_of(&self, stream: usize, block: usize) -> usize {
        let first = (stream * self.blocks + block) * BLOCK_ROWS;
        self.shape.rows.saturating_sub(first).min(BLOCK_ROWS)
    }

    /// The number of symbols decoded by the lanes of a stream's rows.
    pub(super) fn symbols_of(&self, stream: usize) -> usize {
        let rows = (0..self.blocks).map(|block| self.rows_of(stream, block));
        rows.sum::<usize>() * self.quads() * QUAD
    }

    /// What symbols stand for.
    pub fn symbols(&self) -> Symbols {
        self.symbols
    }

    /// The number of low bits of a code, stored apart from its symbol.
    pub fn low_bits(&self) -> usize {
        self.symbols.low_bits()
    }

    /// The bytes of a table: the lowest integer and the frequencies.
    pub(super) fn table_bytes(&self) -> usize {
        1 + self.table_symbols
    }

    /// The bytes of a stream's bit planes, after its renormalization bytes; only row blocks that exist have planes.
    pub(super) fn plane_bytes(&self, stream: usize) -> usize {
        let blocks = (0..self.blocks).filter(|&block| self.rows_of(stream, block) > 0);
        blocks.count() * self.quads() * self.low_bits() * PLANE
    }

    /// Whether each row has a scale; otherwise the tensor has a single one.
    pub fn has_row_scales(&self) -> bool {
        self.row_scales
    }

    /// The kind of column scales.
    pub fn column_scales(&self) -> ColumnScales {
        self.column_scales
    }

    /// The torch and NumPy name of the scales' type.
    pub fn scale_type(&self) -> &'static str {
        if self.wide_scales { "float32" } else { "bfloat16" }
    }

    /// The number of tables.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// The number of exceptions: codes that differ from their streams' decoded values.
    pub fn exceptions(&self) -> usize {
        self.exceptions
    }

    /// The number of stored row scales.
    pub(super) fn scales(&self) -> usize {
        match self.row_scales {
            true => self.shape.experts * self.shape.rows,
            false => 1,
        }
    }

    /// The positions of the sections; `None` if the size overflows.
    pub(super) fn sections(&self) -> Option<Sections> {
        let scales = match self.row_scales {
            true => self.shape.all_rows()?,
            false => 1,
        };
        let scale = if self.wide_scales { 4 } else { 2 };
        let columns = self.column_scales.rows(self.shape.experts);
        let lengths = [
            self.tables.checked_mul(self.table_bytes())?,
            scales.checked_mul(scale)?,
            columns.checked_mul(self.shape.columns)?.checked_mul(scale)?,
            self.shape
                .experts
                .checked_mul(self.streams())?
                .checked_mul(self.entry)?,
            self.exceptions.checked_mul(self.exception)?,
            self.payload,
        ];
        let mut at = HEADER_BYTES;
        let mut sections = [const { 0..0 }; 6];
        for (section, length) in sections.iter_mut().zip(lengths) {
            let end = at.checked_add(length)?;
            *section = at..end;
            at = end.checked_next_multiple_of(ALIGNMENT)?;
        }
        let [tables, scales, columns, index, exceptions, payload] = sections;
        Some(Sections {
            tables,
            scales,
            columns,
            index,
            exceptions,
            payload,
        })
    }

    /// The size of the tensor in bytes, including the zeros after the payload.
    pub(super) fn total(&self) -> Option<usize> {
        self.sections()?
            .payload
            .end
            .checked_add(LANES)?
            .checked_next_multiple_of(ALIGNMENT)
    }

    fn is_valid(&self) -> bool {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape;
        let most = MAX_ROWS as usize;
        self.shape.has_valid_ndim() && experts.max(rows) <= most && columns <= MAX_COLUMNS
    }

    pub(super) fn read(data: &[u8]) -> Result<Layout> {
        let header: &[u8; HEADER_BYTES] = header::read(data, "coded tensor", MAGIC, VERSION)?;
        let size = |at: usize| {
            let word = header[at..at + 8].try_into().map_or(u64::MAX, u64::from_le_bytes);
            usize::try_from(word).unwrap_or(usize::MAX)
        };
        let Some(column_scales) = ColumnScales::from_byte(header[60]) else {
            return corrupt(format!("unknown kind of column scales {}", header[60]));
        };
        let Some(symbols) = Symbols::from_bytes([header[58], header[59]]) else {
            let (low_bits, kind) = (header[58], header[59]);
            return corrupt(format!("unknown symbols of kind {kind} with {low_bits} low bits"));
        };
        let layout = Layout {
            shape: Shape {
                experts: size(16),
                rows: size(24),
                columns: size(32),
                ndim: header[10],
            },
            blocks: header[11].into(),
            row_scales: header[12] == 1,
            column_scales,
            wide_scales: header[13] == 1,
            tables: header[14].into(),
            table_symbols: header[15].into(),
            payload: size(40),
            exceptions: size(48),
            entry: header[56].into(),
            exception: header[57].into(),
            symbols,
        };
        let known = matches!(layout.blocks, 1 | 4)
            && (1..=MAX_TABLES).contains(&layout.tables)
            && (2..=64).contains(&layout.table_symbols)
            && [layout.entry, layout.exception]
                .iter()
                .all(|width| matches!(width, 4 | 8))
            && header[12..14].iter().all(|&flag| flag <= 1)
            && header[61..].iter().all(|&byte| byte == 0);
        match known && layout.is_valid() {
            true => Ok(layout),
            false => corrupt(format!("{layout:?} is not a valid layout")),
        }
    }

    pub(super) fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10..16].copy_from_slice(&[
            self.shape.ndim,
            self.blocks as u8,
            self.row_scales.into(),
            self.wide_scales.into(),
            self.tables as u8,
            self.table_symbols as u8,
        ]);
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape;
        let sizes = [experts, rows, columns, self.payload, self.exceptions];
        for (field, size) in out[16..56].chunks_exact_mut(8).zip(sizes) {
            field.copy_from_slice(&(size as u64).to_le_bytes());
        }
        out[56..58].copy_from_slice(&[self.entry, self.exception].map(|field| field as u8));
        out[58..60].copy_from_slice(&self.symbols.to_bytes());
        out[60] = self.column_scales as u8;
    }
}
