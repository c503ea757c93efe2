//! The layout of a coded tensor on GPUs. It is created when a tensor is uploaded and is never written to a file.
//!
//! A GPU warp decodes the 64 lanes of a row block, two per thread. Sharing one byte stream would need
//! synchronization, so each lane has its own bytes. Symbols, states and bytes are unchanged.
//!
//! On upload the GPU itself creates the records (`cuda/coded_upload.cu`) after the bytes of
//! [`CodedView::device_frame`]. The code here creates them for checks of bytes on a GPU and for tests.
//!
//! A row block is divided into *segments* of columns, which warps decode independently, and segments into *chunks* of
//! 256 columns, which fit shared memory. The values of padding rows are unspecified. The layout is a header of 64-bit
//! words and nine sections, each aligned to 64 bytes:
//!
//! ```text
//! header       magic "MOEPRDEV"; experts, rows, columns, tables; chunks of a segment; bytes of the longest record;
//!              whether each row has a scale; where each section starts, and its bytes
//! head         the packed tensor up to its payload, unchanged
//! scales       f32: one, or E x R
//! columns      f32, column scales: none, or one row of C, or E, each with zeros up to a multiple of 16
//! tables       256 words for each: {0, frequency, slot - start, symbol} of each slot, from the lowest byte
//! blocks       a word for each row block: its table, in the second byte the integer of symbol 0
//! starts       a word for each chunk, and the end: where its record starts in the records, in units of 16 bytes
//! firsts       a word for each segment, and the end: its first correction
//! corrections  the exceptions of the segments: f16 of the difference / 2^24 (16 bits), row (4), column in the segment
//!              (12); differences beyond 2^11 take several
//! records      row block by row block, chunk by chunk: if it begins a segment, the states of all lanes, 16 bits
//!              each; the number of bytes of each lane, 8 bits; the bytes of each lane; zeros
//! ```
//!
//! With segments of 1,024 columns, states take 1/16 bit per weight and byte counts 1/8.
//!
//! *Dependent codes* ([`trellis`]) are `2 half - 127`. Their tables list, instead of a symbol, the half of its index
//! in even states, which is even, and in bit 7 the parity of the index. Words of row blocks have -127 in the second
//! byte and 1 in the third. Corrections are half as large. The lanes' states are followed by 32 bytes that give the
//! lanes' positions on their paths: bits 0, 2, 4 and 6 of byte i tell whether lane i would be in odd states at the
//! next four quads if all further indices were even; the next higher bits tell the same for lane i + 32.
//! `cuda/paths.cuh` explains why this is sufficient.

mod restore;
#[cfg(test)]
mod tests;

use std::ops::Range;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::layout::{ALIGNMENT, Layout, STATE_BYTES};
use super::table::{SLOTS, Table};
use super::trellis::{self, NEXT};
use super::view::CodedView;
use super::{BLOCK_ROWS, LANES, QUAD, invalid};
use crate::Result;

pub use restore::from_device;

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPRDEV";
/// The columns of a chunk.
pub const CHUNK: usize = 256;
/// The maximum number of registers of a chunk, and of bytes of a lane in it.
const QUADS: usize = CHUNK / QUAD;
/// The columns of a tensor core product; rows of column scales are padded to a multiple of it.
const GROUP: usize = 16;
/// The alignment of records in bytes.
const UNIT: usize = 16;
/// The maximum number of chunks of a segment: corrections have 12 bits for a column.
const MOST_CHUNKS: usize = 16;
/// The default number of chunks of a segment. Segments have one chunk in matrices that would not occupy a GPU
/// otherwise: those with fewer columns or fewer segments (2080 x 6144 takes 13 us instead of 19 on an H100).
const USUAL: usize = 4;
const SHORT: usize = 2;
const WIDE: usize = 4096;
const MANY: usize = 2048;
const SECTIONS: usize = 9;
const HEADER_WORDS: usize = 8 + 2 * SECTIONS;
/// The bytes of a record that hold the lanes' positions on their paths.
const PATH_BYTES: usize = LANES / 2;
/// The bytes after the last record that kernels may read.
const SLACK: usize = 256;

/// The division of row blocks into segments and chunks.
#[derive(Debug, Clone, Copy)]
struct Cut {
    layout: Layout,
    /// The chunks of a segment.
    of_segment: usize,
}

impl Cut {
    fn new(layout: Layout, of_segment: Option<usize>) -> Result<Cut> {
        let usual = Cut {
            layout,
            of_segment: USUAL,
        };
        let few = layout.shape.experts == 1 && usual.all_blocks() * usual.segments() < MANY;
        let default = if few || layout.shape.columns < WIDE {
            SHORT
        } else {
            USUAL
        };
        match of_segment.unwrap_or(default) {
            of_segment @ 1..=MOST_CHUNKS => Ok(Cut { layout, of_segment }),
            other => invalid(format!("segments have 1 to {MOST_CHUNKS} chunks, not {other}")),
        }
    }

    /// The row blocks of an expert.
    fn blocks(&self) -> usize {
        match self.layout.shape.columns {
            0 => 0,
            _ => self.layout.shape.rows.div_ceil(BLOCK_ROWS),
        }
    }

    /// The row blocks of all experts.
    fn all_blocks(&self) -> usize {
        self.layout.shape.experts * self.blocks()
    }

    /// The chunks of a row block.
    fn chunks(&self) -> usize {
        self.layout.quads().div_ceil(QUADS)
    }

    /// The segments of a row block.
    fn segments(&self) -> usize {
        self.chunks().div_ceil(self.of_segment)
    }

    /// The streams of all experts.
    fn streams(&self) -> usize {
        self.layout.shape.experts * self.layout.streams()
    }

    /// The row blocks of a stream; both are counted over all experts.
    fn blocks_of(&self, stream: usize) -> Range<usize> {
        let (expert, stream) = (stream / self.layout.streams(), stream % self.layout.streams());
        let first = stream * self.layout.blocks;
        let last = (first + self.layout.blocks).min(self.blocks());
        expert * self.blocks() + first..expert * self.blocks() + last
    }

    /// The lanes of a row block, counted over all experts, that have rows.
    fn lanes_of(&self, block: usize) -> usize {
        let first = block % self.blocks() * BLOCK_ROWS;
        (self.layout.shape.rows - first).min(BLOCK_ROWS) * QUAD
    }

    /// The bytes before the counts in a record that begins a segment.
    fn state_bytes(&self) -> usize {
        STATE_BYTES
            + if self.layout.symbols.is_dependent() {
                PATH_BYTES
            } else {
                0
            }
    }

    /// The registers of a chunk.
    fn quads_of(&self, chunk: usize) -> usize {
        (self.layout.quads() - chunk * QUADS).min(QUADS)
    }
}

/// The entries of a table in the form that kernels read.
fn entries(table: &Table, dependent: bool) -> [u32; SLOTS] {
    let half = |symbol: u8| {
        let even = (table.lowest as u8).wrapping_add(symbol).wrapping_mul(2);
        even.wrapping_add(LANES as u8) | symbol << 7
    };
    std::array::from_fn(|slot| {
        let symbol = table.symbols[slot];
        let start = table.starts[usize::from(symbol)];
        u32::from_le_bytes([
            0,
            table.frequencies[usize::from(symbol)],
            slot as u8 - start,
            if dependent { half(symbol) } else { symbol },
        ])
    })
}

/// The state before renormalization, by its slot's entry.
#[inline(always)]
fn stepped(state: u32, entry: u32) -> u32 {
    (entry >> 8 & 255) * (state >> 8) + (entry >> 16 & 255)
}

/// The positions of two lanes in these states on their paths, as stored in records.
fn path_byte(mut states: [u8; 2]) -> u8 {
    let mut found = 0;
    for quad in 0..4 {
        for (lane, state) in states.iter_mut().enumerate() {
            found |= (*state & 1) << (2 * quad + lane);
            *state = NEXT[usize::from(2 * *state)];
        }
    }
    found
}

/// The device form of a stream.
#[derive(Default)]
struct Part {
    records: Vec<u8>,
    /// The bytes of each record.
    lengths: Vec<usize>,
    corrections: Vec<u32>,
    /// The corrections of each segment.
    counts: Vec<u32>,
}

/// The lanes of a row block: the bytes of each in a chunk, and their positions on their paths, which are 0 for plain
/// codes.
struct Lanes {
    path: [u8; LANES],
    bytes: [[u8; QUADS]; LANES],
    counts: [usize; LANES],
}

impl Lanes {
    /// Decodes registers of the lanes of `states` and collects each lane's bytes, which are read from `source` at
    /// `at`.
    fn fill(
        &mut self,
        states: &mut [u32],
        entries: &[u32; SLOTS],
        quads: usize,
        source: &Source,
        at: &mut usize,
    ) {
        self.counts = [0; LANES];
        for _ in 0..quads {
            let next = source.next(*at);
            let mut read = 0;
            let lanes = states.iter_mut().zip(&mut self.bytes).zip(&mut self.counts);
            for (((state, bytes), count), path) in lanes.zip(&mut self.path) {
                let entry = entries[(*state & 255) as usize];
                *path = NEXT[usize::from(2 * *path) + (entry >> 31) as usize];
                let full = stepped(*state, entry);
                let byte = next[read % LANES];
                let takes = usize::from(full < 256);
                bytes[*count % QUADS] = byte;
                *state = if takes == 1 {
                    full << 8 | u32::from(byte)
                } else {
                    full
                };
                *count += takes;
                read += takes;
            }
            *at = (*at + read).min(source.length);
        }
    }

    /// Writes the lanes' positions on their paths.
    fn write_paths(&self, record: &mut Vec<u8>) {
        let (low, high) = self.path.split_at(PATH_BYTES);
        record.extend(low.iter().zip(high).map(|(&low, &high)| path_byte([low, high])));
    }

    fn write(&self, record: &mut Vec<u8>) {
        record.extend(self.counts.iter().map(|&count| count as u8));
        for (bytes, &count) in self.bytes.iter().zip(&self.counts) {
            record.extend_from_slice(&bytes[..count]);
        }
    }
}

/// The renormalization bytes of a stream and at least 64 bytes after them.
struct Source<'a> {
    bytes: &'a [u8],
    length: usize,
}

impl Source<'_> {
    #[inline(always)]
    fn next(&self, at: usize) -> &[u8; LANES] {
        match self.bytes[at..].first_chunk() {
            Some(next) => next,
            None => unreachable!("at least 64 bytes follow a stream"),
        }
    }
}

/// A layout without its records: the header and `starts` give them zero bytes.
pub struct Frame {
    /// The sections before the records, and the slack after them.
    pub bytes: Vec<u8>,
    /// The start of each stream in the packed tensor, which begins with its states, and the end of the last.
    pub streams: Vec<u64>,
}

impl CodedView<'_> {
    /// Converts to the layout for GPUs, with segments of `of_segment` chunks; the default depends on the number of
    /// columns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if the segment size is out of range or the layout is too large.
    pub fn to_device(&self, of_segment: Option<usize>, pool: &ThreadPool) -> Result<Vec<u8>> {
        self.laid_out(of_segment, pool, |cut, stream, tables| {
            self.records(cut, stream, tables)
        })
    }

    /// Returns the layout without its records, to be filled in on a GPU.
    ///
    /// # Errors
    /// As for [`CodedView::to_device`].
    pub fn device_frame(&self, pool: &ThreadPool) -> Result<Frame> {
        let bytes = self.laid_out(None, pool, |cut, stream, _| Part {
            lengths: vec![0; cut.blocks_of(stream).len() * cut.chunks()],
            ..Part::default()
        })?;
        let streams = self.coded.starts.iter().map(|start| start.at as u64).collect();
        Ok(Frame { bytes, streams })
    }

    /// The layout with the records, or only their lengths, that `records` returns for each stream.
    fn laid_out(
        &self,
        of_segment: Option<usize>,
        pool: &ThreadPool,
        records: impl Fn(&Cut, usize, &[[u32; SLOTS]]) -> Part + Sync,
    ) -> Result<Vec<u8>> {
        if self.layout().low_bits() > 0 {
            return invalid(
                "there are no GPU kernels for codes with low bits, which occur above 5 bits per weight",
            );
        }
        let cut = Cut::new(self.layout(), of_segment)?;
        let dependent = self.layout().symbols.is_dependent();
        let tables = self.coded.tables.iter().map(|table| entries(table, dependent));
        let tables: Vec<_> = tables.collect();
        pool.install(|| {
            let parts = (0..cut.streams()).into_par_iter().map(|stream| {
                let mut part = records(&cut, stream, &tables);
                self.correct(&cut, stream, &mut part);
                part
            });
            self.assemble(&cut, &tables, &parts.collect::<Vec<_>>())
        })
    }

    /// The records of a stream and their lengths.
    fn records(&self, cut: &Cut, stream: usize, tables: &[[u32; SLOTS]]) -> Part {
        let start = &self.coded.starts[stream];
        let (states, bytes) = self.data[start.at..].split_at(STATE_BYTES);
        let length = self.coded.starts[stream + 1].at - start.at - STATE_BYTES;
        let source = Source { bytes, length };
        let mut states: [u32; LANES] =
            std::array::from_fn(|lane| u32::from(states[lane]) << 8 | u32::from(states[LANES + lane]));
        let mut lanes = Lanes {
            path: [0; LANES],
            bytes: [[0; QUADS]; LANES],
            counts: [0; LANES],
        };
        let mut part = Part::default();
        part.records.reserve(length + length / 4);
        let mut at = 0;
        for block in cut.blocks_of(stream) {
            lanes.path = [0; LANES];
            for chunk in 0..cut.chunks() {
                let start = part.records.len();
                if chunk % cut.of_segment == 0 {
                    let stored = states.map(|state| (state as u16).to_le_bytes());
                    part.records.extend_from_slice(stored.as_flattened());
                    if cut.layout.symbols.is_dependent() {
                        lanes.write_paths(&mut part.records);
                    }
                }
                let states = &mut states[..cut.lanes_of(block)];
                lanes.fill(
                    states,
                    &tables[start_table(self, stream)],
                    cut.quads_of(chunk),
                    &source,
                    &mut at,
                );
                lanes.write(&mut part.records);
                part.records.resize(part.records.len().next_multiple_of(UNIT), 0);
                part.lengths.push(part.records.len() - start);
            }
        }
        part
    }

    /// Finds the corrections of a stream, by segment.
    fn correct(&self, cut: &Cut, stream: usize, part: &mut Part) {
        let blocks = cut.blocks_of(stream);
        part.counts.resize(blocks.len() * cut.segments(), 0);
        let mut found = Vec::new();
        let width = cut.of_segment * CHUNK;
        let shift = u32::from(cut.layout.symbols.is_dependent());
        for exception in self.exceptions(stream) {
            let (register, lane) = (exception.place / LANES, exception.place % LANES);
            let (block, quad) = (register / cut.layout.quads(), register % cut.layout.quads());
            let column = quad * QUAD + lane % QUAD;
            if self
                .locate(stream % cut.layout.streams(), exception.place)
                .is_some()
            {
                let place = ((lane / QUAD) << 12) | (column % width);
                found.push((
                    block * cut.segments() + column / width,
                    place as u32,
                    exception.difference >> shift,
                ));
            }
        }
        // Sorted, because unchecked exceptions may be out of order.
        found.sort_by_key(|&(segment, ..)| segment);
        for (segment, place, difference) in found {
            for half in halves(difference) {
                part.corrections.push(u32::from(half) << 16 | place);
                part.counts[segment] += 1;
            }
        }
    }

    /// The word of a row block, which names its table.
    fn note(&self, table: usize) -> u32 {
        let dependent = self.layout().symbols.is_dependent();
        let lowest = match dependent {
            true => trellis::OFFSET as u8,
            false => self.coded.tables[table].lowest as u8,
        };
        u32::from_le_bytes([table as u8, lowest, dependent.into(), 0])
    }

    fn assemble(&self, cut: &Cut, tables: &[[u32; SLOTS]], parts: &[Part]) -> Result<Vec<u8>> {
        let sums = |counts: Vec<usize>| {
            let mut end = 0;
            let ends = counts.into_iter().map(|count| {
                end += count;
                end as u32
            });
            std::iter::once(0).chain(ends).collect::<Vec<u32>>()
        };
        let lengths: Vec<usize> = parts
            .iter()
            .flat_map(|part| part.lengths.iter().copied())
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let counts = parts
            .iter()
            .flat_map(|part| part.counts.iter().map(|&count| count as usize));
        let corrections: Vec<u32> = parts
            .iter()
            .flat_map(|part| part.corrections.iter().copied())
            .collect();
        let scales: Vec<u32> = self.row_scales().into_iter().map(f32::to_bits).collect();
        let columns = self.column_words();
        let blocks: Vec<u32> = (0..cut.streams())
            .flat_map(|stream| cut.blocks_of(stream).map(move |_| start_table(self, stream)))
            .map(|table| self.note(table))
            .collect();
        let records: usize = lengths.iter().sum();
        if records / UNIT > u32::MAX as usize {
            return invalid("too many records");
        }
        let starts = sums(lengths.iter().map(|length| length / UNIT).collect());
        let words = [
            &scales,
            &columns,
            &tables.concat(),
            &blocks,
            &starts,
            &sums(counts.collect()),
            &corrections,
        ];
        let head = &self.data[..self.coded.sections.payload.start];
        let sizes = std::iter::once(head.len()).chain(words.iter().map(|words| 4 * words.len()));
        let (places, total) = placed(sizes.chain([records]));
        let mut out = vec![0; total];
        write_header(cut, longest, tables.len(), &places, &mut out);
        out[places[0].clone()].copy_from_slice(head);
        for (place, words) in places[1..].iter().zip(words) {
            let bytes = out[place.clone()].as_chunks_mut().0;
            bytes
                .iter_mut()
                .zip(words)
                .for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        }
        copy_records(parts, &mut out[places[SECTIONS - 1].clone()]);
        Ok(out)
    }

    /// The scales of columns as words, each row of them padded to whole groups.
    fn column_words(&self) -> Vec<u32> {
        let mut words = Vec::new();
        for row in self
            .column_scales()
            .chunks_exact(self.layout().shape.columns.max(1))
        {
            words.extend(row.iter().map(|scale| scale.to_bits()));
            words.resize(words.len().next_multiple_of(GROUP), 0);
        }
        words
    }
}

/// Copies the records of all parts, one after another, in parallel.
fn copy_records(parts: &[Part], mut out: &mut [u8]) {
    let mut pairs = Vec::with_capacity(parts.len());
    for part in parts {
        let (place, behind) = out.split_at_mut(part.records.len());
        pairs.push((place, &part.records));
        out = behind;
    }
    pairs
        .into_par_iter()
        .for_each(|(place, records)| place.copy_from_slice(records));
}

fn start_table(view: &CodedView, stream: usize) -> usize {
    view.coded.starts[stream].table
}

/// The positions of sections with these sizes, and the total size.
fn placed(sizes: impl Iterator<Item = usize>) -> (Vec<Range<usize>>, usize) {
    let mut end = 8 * HEADER_WORDS;
    let places = sizes.map(|size| {
        let start = end.next_multiple_of(ALIGNMENT);
        end = start + size;
        start..end
    });
    let places: Vec<_> = places.collect();
    (places, (end + SLACK).next_multiple_of(ALIGNMENT))
}

fn write_header(cut: &Cut, longest: usize, tables: usize, places: &[Range<usize>], out: &mut [u8]) {
    let shape = cut.layout.shape;
    let numbers = [
        shape.experts,
        shape.rows,
        shape.columns,
        tables,
        cut.of_segment,
        longest,
        usize::from(cut.layout.row_scales),
    ];
    let places = places.iter().flat_map(|place| [place.start, place.len()]);
    let words = out[..8 * HEADER_WORDS].as_chunks_mut::<8>().0;
    words[0] = MAGIC;
    for (word, number) in words[1..].iter_mut().zip(numbers.into_iter().chain(places)) {
        *word = (number as u64).to_le_bytes();
    }
}

/// Splits a difference into f16 numbers that add up to it, each divided by 2^24: f16 holds eleven bits.
fn halves(difference: i32) -> impl Iterator<Item = u16> {
    let mut rest = i64::from(difference);
    std::iter::from_fn(move || {
        let size = rest.unsigned_abs();
        let below = (64 - size.leading_zeros()).saturating_sub(11);
        let part = (size >> below << below) as i64 * rest.signum();
        rest -= part;
        (part != 0).then(|| half::f16::from_f64(part as f64 / f64::from(1 << 24)).to_bits())
    })
}
