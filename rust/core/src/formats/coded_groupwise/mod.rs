//! Group-wise tensors whose bytes are entropy coded, block by block: smaller, slower, multiplied the same way.
//!
//! Two-bit codes of a plain minimum-maximum grid have an entropy of 1.59 bits, those of a grid searched for the least
//! error 1.92, and the upper bytes of f16 parameters repeat themselves. Three Huffman codes take that out: one for the
//! lower bytes of parameters, one for the upper ones, one for the bytes of codes (four 2-bit codes each).
//!
//! ```text
//!   0 8s magic "MOEPGRPC"   8 u16 version 1   10 6 zeros   16 u64 bytes of the payload   24 40 zeros
//!  64 the 128 bytes of header of the group-wise tensor that this one stands for
//! 192 for each of the three codes 256 lengths of codewords, 4 bits each, the lower symbol low; 0 for none
//! 576 index     for each block five u16: bytes of its streams
//!     payload   from the next multiple of 64: the blocks' streams, back to back; zeros to the next multiple of 64
//! ```
//!
//! A block's first stream holds its parameters with their padding, lower and upper byte in turn; the others hold a
//! quarter of the bytes of codes each, the last of which may be short (so four symbols decode at a time). A stream's
//! codewords follow each other from the lowest bit on; its last byte is filled up with zeros.
//!
//! A product decodes a block of 16 rows into a buffer that stays in the cache and multiplies it with the kernels of the
//! plain format. Nothing else is ever unpacked.
//!
//! Invariants of [`Coded`]: streams lie in the payload; codes are complete, so any bits decode; a byte has at least one
//! bit, so a tensor is at most eight times the size of its payload.

mod encode;
pub mod huffman;
#[cfg(test)]
mod tests;

use std::ops::Range;

use huffman::{Lengths, PER_REFILL, Reader, Table};
use rayon::ThreadPool;
use rayon::prelude::*;

pub use encode::encode;

use crate::formats::groupwise::{Blocks, HEADER_BYTES, Layout, View};
use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPGRPC";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;

const INNER: usize = 64;
const LENGTHS: usize = INNER + HEADER_BYTES;
const CODES: usize = 3;
const INDEX: usize = LENGTHS + CODES * 128;
const STREAMS: usize = 5;
const ENTRY: usize = 2 * STREAMS;
const ALIGNMENT: usize = 64;

/// What opening a tensor finds: everything but its payload.
#[derive(Clone)]
pub struct Coded {
    layout: Layout,
    tables: [Table; CODES],
    /// Where each block begins in the tensor, and where the payload ends.
    starts: Vec<usize>,
    total: usize,
}

impl Coded {
    /// Checks header, codes and index.
    ///
    /// # Errors
    /// [`Error::Corruption`] or `InsufficientData`: the bytes are no such tensor.
    pub fn parse(data: &[u8]) -> Result<Coded> {
        let Some(header) = data.get(..INDEX) else {
            return insufficient(format!("{} bytes hold no header", data.len()));
        };
        check_header(header)?;
        let layout = Layout::read_header(&header[INNER..LENGTHS])?;
        let blocks = layout.shape().experts.checked_mul(layout.blocks());
        let end = blocks.and_then(|blocks| blocks.checked_mul(ENTRY)?.checked_add(INDEX));
        let Some(index) = end.and_then(|end| data.get(INDEX..end)) else {
            return insufficient("bytes end within the index");
        };
        let payload = (INDEX + index.len()).next_multiple_of(ALIGNMENT);
        let starts = starts(index, payload, &layout)?;
        let end = starts[starts.len() - 1];
        let total = end.next_multiple_of(ALIGNMENT);
        if header[16..24] != ((end - payload) as u64).to_le_bytes() {
            return corrupt("the index contradicts the payload's size");
        }
        if data.len() < total {
            return insufficient(format!("{} bytes instead of {total}", data.len()));
        }
        let padding = data[INDEX + index.len()..payload].iter().chain(&data[end..]);
        if data.len() > total || padding.into_iter().any(|&byte| byte != 0) {
            return corrupt("bytes that belong to nothing");
        }
        Ok(Coded {
            layout,
            tables: tables(&header[LENGTHS..])?,
            starts,
            total,
        })
    }

    /// The layout of the group-wise tensor that this one stands for.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// The tensor's blocks; `data` must be what was parsed, or at least as long.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: it is shorter.
    pub fn view<'a>(&'a self, data: &'a [u8]) -> Result<CodedView<'a>> {
        if data.len() < self.total {
            return Err(Error::InvalidArgument(
                "the data are not those that were parsed".into(),
            ));
        }
        Ok(CodedView { coded: self, data })
    }
}

/// A tensor that can be multiplied.
#[derive(Clone, Copy)]
pub struct CodedView<'a> {
    coded: &'a Coded,
    data: &'a [u8],
}

impl Blocks for CodedView<'_> {
    fn layout(&self) -> Layout {
        self.coded.layout
    }

    fn fetch<'s>(&'s self, block: usize, buffer: &'s mut Vec<u8>) -> &'s [u8] {
        let size = self.coded.layout.block_bytes();
        buffer.resize(2 * size, 0);
        let (out, scratch) = buffer.split_at_mut(size);
        self.decode(block, scratch, out);
        out
    }

    fn memory(&self, blocks: Range<usize>) -> &[u8] {
        &self.data[self.coded.starts[blocks.start]..self.coded.starts[blocks.end]]
    }
}

impl CodedView<'_> {
    /// Decodes a block of all experts' blocks; returns whether every stream ended where it should. `scratch` is as long
    /// as the block.
    fn decode(&self, block: usize, scratch: &mut [u8], out: &mut [u8]) -> bool {
        let [low, high, bytes] = &self.coded.tables;
        let streams = self.streams(block);
        let (parameters, codes) = scratch.split_at_mut(self.coded.layout.parameter_bytes());
        let mut reader = Reader::new(streams[0]);
        for pair in parameters.as_chunks_mut::<2>().0 {
            reader.refill();
            *pair = [reader.next(low), reader.next(high)];
        }
        let quarters = decode_quarters([streams[1], streams[2], streams[3], streams[4]], bytes, codes);
        self.coded.layout.interleave(parameters, codes, out);
        reader.finished() && quarters
    }

    fn streams(&self, block: usize) -> [&[u8]; STREAMS] {
        let entry = &self.data[INDEX + block * ENTRY..][..ENTRY];
        let mut at = self.coded.starts[block];
        std::array::from_fn(|i| {
            let stream = &self.data[at..][..length(entry, i)];
            at += stream.len();
            stream
        })
    }

    /// The group-wise tensor that this one stands for.
    ///
    /// # Errors
    /// None so far: opening has checked everything that decoding relies on.
    pub fn expand(&self, pool: &ThreadPool) -> Result<Vec<u8>> {
        let layout = self.coded.layout;
        let mut out = vec![0; layout.total_bytes()];
        out[..HEADER_BYTES].copy_from_slice(&self.data[INNER..LENGTHS]);
        if layout.block_bytes() > 0 {
            let blocks = out[HEADER_BYTES..].par_chunks_exact_mut(layout.block_bytes());
            pool.install(|| {
                let scratch = || vec![0; layout.block_bytes()];
                blocks
                    .enumerate()
                    .for_each_init(scratch, |scratch, (block, out)| {
                        self.decode(block, scratch, out);
                    })
            });
        }
        Ok(out)
    }

    /// Checks that every stream ends where the index says, and the decoded tensor.
    ///
    /// # Errors
    /// [`Error::Corruption`] that names the block or expert and row.
    pub fn verify(&self, pool: &ThreadPool) -> Result<()> {
        let layout = self.coded.layout;
        let ends = |block: usize| {
            let mut buffer = vec![0; 2 * layout.block_bytes()];
            let (out, scratch) = buffer.split_at_mut(layout.block_bytes());
            match self.decode(block, scratch, out) {
                true => Ok(()),
                false => corrupt(format!("block {block}: a stream does not end with its codes")),
            }
        };
        pool.install(|| {
            (0..self.coded.starts.len() - 1)
                .into_par_iter()
                .try_for_each(ends)
        })?;
        View::parse(&self.expand(pool)?)?.verify(pool)
    }
}

/// Decodes four streams side by side: the look-ups of one wait for each other, those of four do not.
fn decode_quarters(streams: [&[u8]; 4], table: &Table, out: &mut [u8]) -> bool {
    let mut readers = streams.map(Reader::new);
    let mut rest = out;
    let quarter = rest.len().div_ceil(4);
    let mut parts: [&mut [u8]; 4] = std::array::from_fn(|_| {
        let length = quarter.min(rest.len());
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(length);
        rest = behind;
        part
    });
    let rounds = parts[3].len() / PER_REFILL;
    {
        let [a, b, c, d] = &mut parts;
        let chunks = a.as_chunks_mut::<PER_REFILL>().0.iter_mut();
        let chunks = chunks.zip(b.as_chunks_mut::<PER_REFILL>().0);
        let chunks = chunks.zip(
            c.as_chunks_mut::<PER_REFILL>()
                .0
                .iter_mut()
                .zip(d.as_chunks_mut::<PER_REFILL>().0),
        );
        let [ra, rb, rc, rd] = &mut readers;
        for ((a, b), (c, d)) in chunks.take(rounds) {
            ra.refill();
            rb.refill();
            rc.refill();
            rd.refill();
            for i in 0..PER_REFILL {
                a[i] = ra.next(table);
                b[i] = rb.next(table);
                c[i] = rc.next(table);
                d[i] = rd.next(table);
            }
        }
    }
    let mut finished = true;
    for (reader, part) in readers.iter_mut().zip(parts) {
        for symbol in &mut part[rounds * PER_REFILL..] {
            reader.refill();
            *symbol = reader.next(table);
        }
        finished &= reader.finished();
    }
    finished
}

fn check_header(header: &[u8]) -> Result<()> {
    if header[..8] != MAGIC {
        return corrupt("wrong magic");
    }
    let version = u16::from_le_bytes([header[8], header[9]]);
    if version != VERSION {
        return corrupt(format!("version {version}; this library reads {VERSION}"));
    }
    match header[10..16]
        .iter()
        .chain(&header[24..INNER])
        .any(|&byte| byte != 0)
    {
        true => corrupt("reserved header bytes are not zero"),
        false => Ok(()),
    }
}

fn tables(nibbles: &[u8]) -> Result<[Table; CODES]> {
    let mut tables = Vec::with_capacity(CODES);
    for nibbles in nibbles.chunks_exact(128) {
        let lengths: Lengths = std::array::from_fn(|symbol| nibbles[symbol / 2] >> (4 * (symbol % 2)) & 15);
        if !huffman::complete(&lengths) {
            return corrupt("the lengths of codewords make no complete code");
        }
        tables.push(Table::new(&lengths));
    }
    tables
        .try_into()
        .map_err(|_| Error::Corruption("three codes".into()))
}

/// Symbols of each of a block's streams.
fn symbols(layout: &Layout) -> [usize; STREAMS] {
    let codes = layout.block_bytes() - layout.parameter_bytes();
    let quarter = codes.div_ceil(4);
    let part = |i: usize| quarter.min(codes.saturating_sub(i * quarter));
    [layout.parameter_bytes(), part(0), part(1), part(2), part(3)]
}

fn length(entry: &[u8], stream: usize) -> usize {
    usize::from(u16::from_le_bytes([entry[2 * stream], entry[2 * stream + 1]]))
}

fn starts(index: &[u8], payload: usize, layout: &Layout) -> Result<Vec<usize>> {
    let symbols = symbols(layout);
    let mut starts = Vec::with_capacity(index.len() / ENTRY + 1);
    let mut at = payload;
    starts.push(at);
    for entry in index.chunks_exact(ENTRY) {
        for (stream, &symbols) in symbols.iter().enumerate() {
            let length = length(entry, stream);
            if 8 * length < symbols {
                return corrupt(format!(
                    "block {}: {length} bytes cannot hold {symbols} codewords",
                    starts.len() - 1
                ));
            }
            at += length;
        }
        starts.push(at);
    }
    Ok(starts)
}

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("coded group-wise tensor: {what}")))
}

fn insufficient<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InsufficientData(format!(
        "coded group-wise tensor: {what}"
    )))
}
