//! Reads a tensor in place.

use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::decode::{Chain, decode};
use super::layout::{ALIGNMENT, Layout, PLANE, STATE_BYTES, Sections};
use super::planes::lows;
use super::register::Register;
use super::table::Table;
use super::{BLOCK_ROWS, LANES, QUAD, corrupt, invalid, trellis};
use crate::simd::Isa;
use crate::{Error, Result};

/// The maximum number of symbols per byte: a symbol with 255 slots takes 1/177 of a bit.
const MOST_SYMBOLS: usize = 8 * 178;

/// The parsed structure of a tensor: everything except scales, exceptions and streams.
#[derive(Debug, Clone)]
pub struct Coded {
    pub(super) layout: Layout,
    pub(super) tables: Vec<Table>,
    /// The start of each stream, and the end of the last.
    pub(super) starts: Vec<Start>,
    pub(super) sections: Sections,
    total: usize,
}

/// The start of a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    /// The offset of its first byte in the tensor.
    pub at: usize,
    /// The index of its first exception.
    pub exception: usize,
    pub table: usize,
}

/// A code that differs from its stream's decoded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exception {
    /// The index of the weight in its stream, in decoding order.
    pub place: usize,
    /// The value to add to the decoded code.
    pub difference: i32,
}

impl Coded {
    /// Checks the header, tables, index and padding.
    ///
    /// # Errors
    /// [`Error::Corruption`] or `InsufficientData` if the bytes are not such a tensor.
    pub fn parse(data: &[u8]) -> Result<Coded> {
        let layout = Layout::read(data)?;
        let (Some(sections), Some(total)) = (layout.sections(), layout.total()) else {
            return corrupt(format!("{layout:?} is not a valid layout"));
        };
        if data.len() < total {
            let message = format!("coded tensor: {} bytes instead of {total}", data.len());
            return Err(Error::InsufficientData(message));
        }
        let padding = sections
            .ends()
            .map(|end| end..end.next_multiple_of(ALIGNMENT).min(data.len()));
        let mut unused = padding
            .into_iter()
            .chain(std::iter::once(sections.payload.end..data.len()));
        if data.len() > total || unused.any(|range| data[range].iter().any(|&byte| byte != 0)) {
            return corrupt("unused bytes");
        }
        let tables = data[sections.tables.clone()].chunks_exact(layout.table_bytes());
        let tables = tables.map(|table| Table::new(table[0] as i8, &table[1..]));
        let Some(tables) = tables.collect::<Option<Vec<_>>>() else {
            return corrupt("frequencies do not add up to 256, or an integer does not fit a signed byte");
        };
        if layout.symbols.is_dependent() && !tables.iter().all(trellis::holds) {
            return corrupt("a table is not valid for dependent codes");
        }
        let starts = starts(&layout, &data[sections.index.clone()], sections.payload.start)?;
        Ok(Coded {
            layout,
            tables,
            starts,
            sections,
            total,
        })
    }

    /// The contents of the header.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// The size in bits per weight, everything included; 0 for a tensor without weights.
    pub fn bits_per_weight(&self) -> f64 {
        match self.layout.shape.weights() {
            None | Some(0) => 0.0,
            Some(weights) => 8.0 * self.total as f64 / weights as f64,
        }
    }

    /// A view of the tensor over its bytes; `data` must be the parsed bytes and may be longer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `data` is shorter.
    pub fn view<'a>(&'a self, data: &'a [u8]) -> Result<CodedView<'a>> {
        match data.len() < self.total {
            true => invalid("the bytes differ from the parsed ones"),
            false => Ok(CodedView {
                coded: self,
                data: &data[..self.total],
            }),
        }
    }
}

/// The starts of all streams, and the end of the payload and the exceptions.
fn starts(layout: &Layout, index: &[u8], payload: usize) -> Result<Vec<Start>> {
    let mut starts = Vec::with_capacity(index.len() / layout.entry + 1);
    let (mut at, mut exception) = (payload, 0);
    for entry in index.chunks_exact(layout.entry) {
        let [length, table, exceptions] = split_entry(entry);
        let number = starts.len();
        if table >= layout.tables {
            return corrupt(format!("stream {number} has no table"));
        }
        let stream = number % layout.streams();
        if layout.symbols_of(stream) > MOST_SYMBOLS * (length + LANES) {
            return corrupt(format!("stream {number}: {length} bytes cannot hold its codes"));
        }
        starts.push(Start { at, exception, table });
        at += STATE_BYTES + length + layout.plane_bytes(stream);
        exception += exceptions;
    }
    starts.push(Start {
        at,
        exception,
        table: 0,
    });
    match at - payload == layout.payload && exception == layout.exceptions {
        true => Ok(starts),
        false => corrupt("the index contradicts the header"),
    }
}

/// The renormalization bytes, the table and the exceptions of an index entry.
fn split_entry(entry: &[u8]) -> [usize; 3] {
    let mut word = [0; 8];
    word[..entry.len()].copy_from_slice(entry);
    let word = u64::from_le_bytes(word) as usize;
    match entry.len() {
        4 => [word & 0xffff, word >> 16 & 0xff, word >> 24],
        _ => [word & 0xffff_ffff, word >> 32 & 0xff, word >> 40],
    }
}

/// A tensor ready for decoding.
#[derive(Debug, Clone, Copy)]
pub struct CodedView<'a> {
    pub(super) coded: &'a Coded,
    pub(super) data: &'a [u8],
}

impl<'a> CodedView<'a> {
    /// The contents of the header.
    pub fn layout(&self) -> Layout {
        self.coded.layout
    }

    /// The bytes of a range of streams, counted over all experts.
    pub fn memory(&self, streams: Range<usize>) -> &'a [u8] {
        let starts = &self.coded.starts;
        &self.data[starts[streams.start].at..starts[streams.end].at]
    }

    /// A decoder at the start of a stream, counted over all experts.
    pub fn chain(&self, stream: usize) -> Chain<'a> {
        let start = self.coded.starts[stream];
        Chain::new(
            &self.coded.tables[start.table],
            &self.data[start.at..],
            self.coded_bytes(stream),
            self.coded.layout.symbols.is_dependent(),
        )
    }

    /// The bytes of a stream's states and renormalization, without its bit planes; streams are counted over all
    /// experts.
    fn coded_bytes(&self, stream: usize) -> usize {
        let (layout, starts) = (&self.coded.layout, &self.coded.starts);
        starts[stream + 1].at - starts[stream].at - layout.plane_bytes(stream % layout.streams())
    }

    /// The bit planes of a range of registers of a stream, which is counted over all experts.
    pub fn planes(&self, stream: usize, registers: Range<usize>) -> &'a [u8] {
        let width = self.coded.layout.low_bits() * PLANE;
        let planes = &self.memory(stream..stream + 1)[self.coded_bytes(stream)..];
        &planes[registers.start * width..registers.end * width]
    }

    /// The exceptions of a stream, counted over all experts. Positions and differences are not checked.
    pub fn exceptions(&self, stream: usize) -> impl Iterator<Item = Exception> + use<'a> {
        let layout = &self.coded.layout;
        let (width, factor) = (layout.exception, layout.symbols.difference_factor());
        let [first, next] = [stream, stream + 1].map(|stream| self.coded.starts[stream].exception);
        let section = &self.data[self.coded.sections.exceptions.clone()];
        section[first * width..next * width]
            .chunks_exact(width)
            .map(move |bytes| {
                let (difference, place) = bytes.split_at(if width == 4 { 1 } else { 4 });
                let word = |bytes: &[u8]| {
                    let mut word = [0; 4];
                    word[..bytes.len()].copy_from_slice(bytes);
                    u32::from_le_bytes(word)
                };
                let difference = match width {
                    4 => i32::from(difference[0] as i8),
                    _ => word(difference) as i32,
                };
                Exception {
                    place: word(place) as usize,
                    difference: difference.wrapping_mul(factor),
                }
            })
    }

    /// The row of an expert and the column of a position in a stream, or `None` for padding.
    #[inline]
    pub fn locate(&self, stream: usize, place: usize) -> Option<(usize, usize)> {
        let layout = &self.coded.layout;
        let (register, lane) = (place / LANES, place % LANES);
        let (block, quad) = (register / layout.quads(), register % layout.quads());
        let row = (stream * layout.blocks + block) * BLOCK_ROWS + lane / QUAD;
        let column = quad * QUAD + lane % QUAD;
        (block < layout.blocks && row < layout.shape.rows && column < layout.shape.columns)
            .then_some((row, column))
    }

    /// Decodes everything. `put` gets the number, counted over all experts, and the codes of each row, and writes its
    /// part of `out`, which has one value per weight.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `out` has another length; errors of `put`.
    pub fn decode_rows<T: Send>(
        &self,
        isa: Isa,
        out: &mut [T],
        pool: &ThreadPool,
        put: impl Fn(usize, &[i32], &mut [T]) -> Result<()> + Sync,
    ) -> Result<()> {
        let (layout, shape) = (self.coded.layout, self.coded.layout.shape);
        if shape.weights() != Some(out.len()) {
            return invalid(format!(
                "the output has {} values for the weights of {shape:?}",
                out.len()
            ));
        }
        let columns = shape.columns.max(1);
        let experts = out.par_chunks_mut((shape.rows * columns).max(1)).enumerate();
        let streams = experts.flat_map(|(expert, out)| {
            let streams = out.par_chunks_mut(layout.stream_rows() * columns).enumerate();
            streams.map(move |(stream, out)| (expert, stream, out))
        });
        pool.install(|| {
            streams.try_for_each(|(expert, stream, out)| {
                let first = expert * shape.rows + stream * layout.stream_rows();
                let mut rows = out.chunks_exact_mut(columns).enumerate();
                self.decode_stream(isa, expert, stream, layout.stream_rows(), |codes| {
                    match rows.next() {
                        Some((row, out)) => put(first + row, codes, out),
                        None => Ok(()),
                    }
                })
            })
        })
    }

    /// Decodes the first `count` rows of an expert's stream: `put` gets the codes [C] of each existing row, in order.
    pub(super) fn decode_stream(
        &self,
        isa: Isa,
        expert: usize,
        stream: usize,
        count: usize,
        mut put: impl FnMut(&[i32]) -> Result<()>,
    ) -> Result<()> {
        let (layout, columns) = (&self.coded.layout, self.coded.layout.shape.columns);
        let number = expert * layout.streams() + stream;
        let mut chain = self.chain(number);
        let mut registers = vec![Register::ZERO; layout.quads()];
        let mut low_bits = registers.clone();
        let mut exceptions = self.exceptions(number).peekable();
        let mut codes = vec![0; BLOCK_ROWS * columns];
        for block in 0..count.div_ceil(BLOCK_ROWS).min(layout.blocks) {
            let rows = layout.rows_of(stream, block);
            let wanted = rows.min(count - block * BLOCK_ROWS);
            chain.start_block(rows);
            decode(
                isa,
                std::slice::from_mut(&mut chain),
                layout.quads(),
                &mut registers,
            );
            chain.codes(isa, &mut registers);
            if layout.low_bits() > 0 && rows > 0 {
                let place = block * layout.quads()..(block + 1) * layout.quads();
                lows(isa, self.planes(number, place), &mut low_bits);
            }
            for (row, codes) in codes.chunks_exact_mut(columns).take(wanted).enumerate() {
                for (column, code) in codes.iter_mut().enumerate() {
                    let (register, lane) = (column / QUAD, row * QUAD + column % QUAD);
                    let high = i32::from(registers[register].0[lane] as i8);
                    *code = (high << layout.low_bits()) + i32::from(low_bits[register].0[lane]);
                }
            }
            let end = (block + 1) * layout.quads() * LANES;
            while let Some(exception) = exceptions.next_if(|exception| exception.place < end) {
                let found = self.locate(stream, exception.place);
                let first = (stream * layout.blocks + block) * BLOCK_ROWS;
                if let Some((row, column)) = found.filter(|(row, _)| *row >= first) {
                    let code = &mut codes[(row - first) * columns + column];
                    *code = code.wrapping_add(exception.difference);
                }
            }
            codes.chunks_exact(columns).take(wanted).try_for_each(&mut put)?;
        }
        Ok(())
    }
}
