//! Panels of coded weights in bf16 for [`crate::gemm::panel`], for experts with many tokens.
//!
//! Streams can only be decoded from their start, so a strip's blocks are decoded when it is opened. Panels hold
//! codes, which are exact in bf16 up to 256, and sums are scaled at the end. Tokens are multiplied by the column
//! scales before rounding.

use std::ops::Range;

use crate::formats::coded::{
    BLOCK_ROWS, Chain, CodedView, Exception, LANES, QUAD, Register, decode, lows, side_by_side,
    well_side_by_side,
};
use crate::gemm::panel::{
    Backend, Element, Instructions, Line, Section, Source, Square, Tile, TokenForm, bf16, pair, round_token,
};
use crate::simd::{Isa, vectorized};
use crate::types::{Activations, Shape};

/// The registers of a chunk of columns; each becomes two lines.
const CHUNK: usize = 8;
/// Registers decoded at a time.
const PIECE: usize = 32;
/// The maximum bytes of codes of a strip, which stay in the second-level cache, if streams are short enough.
const STRIP_BYTES: usize = 400 << 10;

/// The minimum number of tokens of an expert for which panels are faster.
pub(super) fn fewest(backend: Backend) -> usize {
    match backend.instructions() {
        Instructions::Matrix => 5,
        Instructions::Avx512 => 9,
        Instructions::Avx2 => 12,
        _ => 2,
    }
}

/// A tensor and the settings of its panels.
pub(super) struct Panels<'a> {
    view: CodedView<'a>,
    /// The instruction set for decoding.
    isa: Isa,
}

/// A decoded row block.
#[derive(Default)]
pub(super) struct Block {
    /// Codes, or their part above the low bits, as signed bytes, padded with zeros to a whole chunk.
    codes: Vec<Register>,
    /// The low bits, if the tensor has any.
    lows: Vec<Register>,
    /// Exceptions, with positions counted from the block's first weight.
    exceptions: Vec<Exception>,
}

impl<'a> Panels<'a> {
    /// Panels for a backend.
    pub fn new(view: CodedView<'a>, backend: Backend) -> Self {
        Panels {
            view,
            isa: backend.vectors(),
        }
    }

    /// The row blocks of an expert.
    fn blocks(&self) -> usize {
        self.shape().rows.div_ceil(BLOCK_ROWS)
    }

    /// Decodes the row blocks of a range of an expert's streams into their entries in `open`, which starts at block
    /// `first` of the expert.
    fn open_streams(&self, expert: usize, streams: Range<usize>, first: usize, open: &mut [Block]) {
        let layout = self.view.layout();
        let number = |stream: usize| expert * layout.streams() + stream;
        let mut chains: Vec<Chain> = streams
            .clone()
            .map(|stream| self.view.chain(number(stream)))
            .collect();
        let mut registers = vec![Register::ZERO; PIECE * chains.len()];
        for block in 0..layout.stream_blocks() {
            for (chain, stream) in chains.iter_mut().zip(streams.clone()) {
                chain.start_block(layout.rows_of(stream, block));
            }
            let blocks = streams
                .clone()
                .map(|stream| stream * layout.stream_blocks() + block);
            for at in (0..layout.quads()).step_by(PIECE) {
                let count = PIECE.min(layout.quads() - at);
                decode(self.isa, &mut chains, count, &mut registers);
                let decoded = registers.chunks_exact(count).zip(&mut chains);
                for ((registers, chain), block) in decoded.zip(blocks.clone()) {
                    if let Some(open) = block.checked_sub(first).and_then(|block| open.get_mut(block)) {
                        let codes = &mut open.codes[at..at + count];
                        codes.copy_from_slice(registers);
                        chain.codes(self.isa, codes);
                        let (stream, block) =
                            (block / layout.stream_blocks(), block % layout.stream_blocks());
                        if layout.low_bits() > 0 && layout.rows_of(stream, block) > 0 {
                            let place = block * layout.quads() + at;
                            let planes = self.view.planes(number(stream), place..place + count);
                            lows(self.isa, planes, &mut open.lows[at..at + count]);
                        }
                    }
                }
            }
        }
        for stream in streams {
            for exception in self.view.exceptions(number(stream)) {
                let size = layout.quads() * LANES;
                let block = stream * layout.stream_blocks() + exception.place / size;
                let found = self
                    .view
                    .locate(stream, exception.place)
                    .and(block.checked_sub(first));
                if let Some(open) = found.and_then(|block| open.get_mut(block)) {
                    let place = exception.place % size;
                    open.exceptions.push(Exception { place, ..exception });
                }
            }
        }
    }
}

impl Source for Panels<'_> {
    type Open = Block;

    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn form(&self) -> TokenForm {
        let columns = self.shape().columns;
        TokenForm {
            element: Element::Bf16,
            columns,
            section: columns.div_ceil(CHUNK * QUAD).max(1),
            variant: 0,
            factors: self.view.columns_identity(),
        }
    }

    fn token(&self, x: &Activations, expert: usize, token: usize, lane: usize, tile: &mut Tile) {
        let scaled = |values: &mut [f32]| {
            if let Some(columns) = self.view.columns(expert) {
                columns.multiply(values);
            }
        };
        round_token(self.isa, x, (token, self.shape().columns), scaled, lane, tile);
    }

    fn together(&self) -> usize {
        let layout = self.view.layout();
        let bytes = layout.stream_blocks() * layout.quads() * LANES;
        let streams = (STRIP_BYTES / bytes.max(1)).clamp(1, well_side_by_side(self.isa));
        streams * layout.stream_blocks()
    }

    fn open(&self, block: usize, open: &mut Block) {
        self.open_strip(block..block + 1, std::slice::from_mut(open));
    }

    fn open_strip(&self, blocks: Range<usize>, open: &mut [Block]) {
        let (layout, all) = (self.view.layout(), self.blocks());
        let (expert, first) = (blocks.start / all, blocks.start % all);
        for open in &mut *open {
            open.codes.clear();
            open.codes
                .resize(layout.quads().next_multiple_of(CHUNK), Register::ZERO);
            open.lows.clear();
            if layout.low_bits() > 0 {
                open.lows.resize(open.codes.len(), Register::ZERO);
            }
            open.exceptions.clear();
        }
        let height = layout.stream_blocks();
        let streams = match layout.streams() {
            0 => 0..0,
            _ => first / height..(first + blocks.len()).div_ceil(height),
        };
        for start in streams.clone().step_by(side_by_side(self.isa)) {
            let end = (start + side_by_side(self.isa)).min(streams.end);
            self.open_streams(expert, start..end, first, open);
        }
    }

    fn decode(&self, _: usize, open: &mut Block, chunks: Range<usize>, to: &mut [Line]) {
        let registers = chunks.start * CHUNK..chunks.end * CHUNK;
        let bits = self.view.layout().low_bits();
        match bits {
            0 => lines(self.isa, &open.codes[registers.clone()], to),
            _ => {
                let (codes, lows) = (&open.codes[registers.clone()], &open.lows[registers.clone()]);
                long_lines(self.isa, codes, lows, bits, to);
            }
        }
        let places = registers.start * LANES..registers.end * LANES;
        let start = open
            .exceptions
            .partition_point(|exception| exception.place < places.start);
        let exceptions = open.exceptions[start..].iter();
        for exception in exceptions.take_while(|exception| exception.place < places.end) {
            let (register, lane) = (exception.place / LANES, exception.place % LANES);
            let low = open.lows.get(register).map_or(0, |lows| lows.0[lane]);
            let code = (i32::from(open.codes[register].0[lane] as i8) << bits) + i32::from(low);
            let code = code.wrapping_add(exception.difference);
            let line = 2 * (register - registers.start) + lane % QUAD / 2;
            let (word, shift) = (&mut to[line].0[lane / QUAD], 16 * (lane % 2));
            *word = *word & !(0xffff << shift) | bf16(code as f32) << shift;
        }
    }

    fn finish(&self, section: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        let (blocks, rows) = (self.blocks(), self.shape().rows);
        let first = section.block % blocks * BLOCK_ROWS;
        let expert = section.block / blocks;
        let scales: [f32; BLOCK_ROWS] = std::array::from_fn(|row| match first + row < rows {
            true => self.view.scale(expert * rows + first + row),
            false => 0.0,
        });
        *out = sums.floats();
        for out in &mut out.0 {
            out.iter_mut().zip(scales).for_each(|(out, scale)| *out *= scale);
        }
    }
}

vectorized! {
    /// Writes two lines per register of codes: for each row its columns 0 and 1, then 2 and 3.
    fn lines(codes: &[Register], to: &mut [Line]) = lines_portable;
}

/// Codes of at most eight bits are exact in bf16: the upper half of the f32.
#[inline(always)]
fn lines_portable(codes: &[Register], to: &mut [Line]) {
    for (codes, lines) in codes.iter().zip(to.as_chunks_mut::<2>().0) {
        let quads = codes.0.as_chunks::<QUAD>().0;
        let [first, second] = lines;
        for ((quad, first), second) in quads.iter().zip(&mut first.0).zip(&mut second.0) {
            let quad = i32::from_le_bytes(*quad);
            let value = |byte: u32| ((quad << (24 - 8 * byte) >> 24) as f32).to_bits();
            *first = value(0) >> 16 | value(1) & 0xffff_0000;
            *second = value(2) >> 16 | value(3) & 0xffff_0000;
        }
    }
}

vectorized! {
    /// Like [`lines`], for codes with `bits` low bits.
    fn long_lines(codes: &[Register], lows: &[Register], bits: usize, to: &mut [Line]) = long_lines_portable;
}

#[inline(always)]
fn long_lines_portable(codes: &[Register], lows: &[Register], bits: usize, to: &mut [Line]) {
    for ((codes, lows), lines) in codes.iter().zip(lows).zip(to.as_chunks_mut::<2>().0) {
        let code = |lane: usize| ((i32::from(codes.0[lane] as i8) << bits) + i32::from(lows.0[lane])) as f32;
        for row in 0..BLOCK_ROWS {
            let lane = row * QUAD;
            lines[0].0[row] = pair(code(lane), code(lane + 1));
            lines[1].0[row] = pair(code(lane + 2), code(lane + 3));
        }
    }
}
