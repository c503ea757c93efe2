//! A thread's work: some rows by all tokens of a task.

use std::ops::Range;

use super::backend::{self, Product};
use super::tokens::Tokens;
use super::{Backend, LANES, Line, Section, Source, Square, Tile};
use crate::gemm::layer::Worker;
#[cfg(target_arch = "x86_64")]
use crate::gemm::tiles::{self, Configured};

/// Chunks of a piece: 32 KB of two blocks' weights.
pub(super) const PIECE: usize = 16;
/// Blocks of a strip of few tokens, which stay in the second-level cache.
const LOW: usize = 2;
/// Blocks of a strip of many tokens: so many products for each read of a token from beyond that cache.
const HIGH: usize = 16;
/// Bytes of tokens that count as few.
const FEW: usize = 256 << 10;
/// Tiles that share a decoded panel: their sums stay in the second-level cache.
const SHARE: usize = 32;

/// A thread's buffers.
pub(super) struct Thread<'a, S> {
    source: &'a S,
    tokens: &'a Tokens,
    /// For each task of the tokens, its expert.
    experts: &'a [usize],
    backend: Backend,
    panel: Vec<Line>,
    /// The sums of sections that go on from piece to piece, [blocks, tiles].
    sums: Vec<Square<u32>>,
    /// The sums of two sections, each [2 blocks, 2 tiles].
    scratch: [[Square<u32>; 4]; 2],
    outputs: Vec<Square<f32>>,
    buffers: Vec<Vec<u8>>,
}

/// Some blocks of an expert by some tiles of a task.
struct Strip<'a> {
    /// Among the blocks of all experts.
    blocks: Range<usize>,
    tiles: &'a [&'a Tile],
}

/// Two blocks (or one) by two tiles (or one) of a strip.
struct Pair {
    blocks: Range<usize>,
    tiles: Range<usize>,
}

impl<'a, S: Source> Thread<'a, S> {
    pub fn new(source: &'a S, tokens: &'a Tokens, experts: &'a [usize], backend: Backend) -> Self {
        Thread {
            source,
            tokens,
            experts,
            backend,
            panel: Vec::new(),
            sums: Vec::new(),
            scratch: [[Square([[0; LANES]; LANES]); 4]; 2],
            outputs: Vec::new(),
            buffers: Vec::new(),
        }
    }
}

impl<S: Source> Worker for Thread<'_, S> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let tiles = self.tokens.of_task(task);
        let size = tiles.len() * self.tokens.chunks() * LANES * size_of::<Line>();
        let height = if size > FEW { HIGH } else { LOW };
        let blocks = self.source.shape().rows.div_ceil(LANES);
        let first = self.experts[task] * blocks;
        let registers = Registers::new(self.backend);
        for (share, tiles) in tiles.chunks(SHARE).enumerate() {
            let out = &mut out[share * SHARE * LANES * rows.len()..];
            for start in rows.clone().step_by(height * LANES) {
                let end = (start + height * LANES).min(rows.end);
                let strip = Strip {
                    blocks: first + start / LANES..first + end.div_ceil(LANES),
                    tiles,
                };
                self.run(&strip, &registers);
                self.write(&strip, start - rows.start..end - rows.start, rows.len(), out);
            }
        }
    }
}

impl<S: Source> Thread<'_, S> {
    fn run(&mut self, strip: &Strip, registers: &Registers) {
        let (blocks, tiles) = (strip.blocks.len(), strip.tiles.len());
        self.buffers.resize_with(blocks.max(self.buffers.len()), Vec::new);
        for (block, buffer) in strip.blocks.clone().zip(&mut self.buffers) {
            self.source.open(block, buffer);
        }
        self.panel.resize(blocks * PIECE * LANES, Line::ZERO);
        if self.goes_on() {
            self.sums.resize(blocks * tiles, Square([[0; LANES]; LANES]));
        }
        self.outputs.clear();
        self.outputs.resize(blocks * tiles, Square([[0.0; LANES]; LANES]));
        let chunks = self.tokens.chunks();
        for first in (0..chunks).step_by(PIECE) {
            let piece = first..(first + PIECE).min(chunks);
            let lines = piece.len() * LANES;
            let panels = self.panel.chunks_exact_mut(lines);
            for ((block, buffer), panel) in strip.blocks.clone().zip(&self.buffers).zip(panels) {
                self.source.decode(block, buffer, piece.clone(), panel);
            }
            for (tile, block) in
                pairs(tiles).flat_map(|tile| pairs(blocks).map(move |block| (tile.clone(), block)))
            {
                let pair = Pair {
                    blocks: block,
                    tiles: tile,
                };
                self.pair(strip, &pair, piece.clone(), registers);
            }
        }
    }

    /// Whether sections go on from piece to piece.
    fn goes_on(&self) -> bool {
        !PIECE.is_multiple_of(self.tokens.form.section) && self.tokens.chunks() > PIECE
    }

    /// Multiplies a piece of two blocks by two tiles, section by section. A section is finished when the products of the
    /// next one are under way.
    fn pair(&mut self, strip: &Strip, pair: &Pair, piece: Range<usize>, registers: &Registers) {
        let (length, chunks) = (self.tokens.form.section, self.tokens.chunks());
        let mut waiting = None;
        let mut start = piece.start;
        for turn in 0.. {
            if start == piece.end {
                break;
            }
            let section = start / length;
            let end = ((section + 1) * length).min(piece.end);
            self.product(strip, pair, (piece.clone(), start..end), turn % 2, registers);
            if let Some(section) = waiting.take() {
                self.finish(strip, pair, section, (turn + 1) % 2);
            }
            if end == ((section + 1) * length).min(chunks) {
                waiting = Some(section);
            }
            start = end;
            let last = start == piece.end || self.goes_on();
            if let Some(section) = waiting.take_if(|_| last) {
                self.finish(strip, pair, section, turn % 2);
            }
        }
    }

    /// Multiplies chunks of a piece.
    fn product(
        &mut self,
        strip: &Strip,
        pair: &Pair,
        (piece, chunks): (Range<usize>, Range<usize>),
        turn: usize,
        registers: &Registers,
    ) {
        let length = self.tokens.form.section;
        let tiles = strip.tiles.len();
        let (sums, block_sums) = match self.goes_on() {
            true => (
                &mut self.sums[pair.blocks.start * tiles + pair.tiles.start..],
                tiles,
            ),
            false => (&mut self.scratch[turn][..], 2),
        };
        let first = &strip.tiles[pair.tiles.start];
        let second = &strip.tiles[pair.tiles.end - 1];
        let lines = chunks.start * LANES..chunks.end * LANES;
        let block_lines = piece.len() * LANES;
        let panel = pair.blocks.start * block_lines + (chunks.start - piece.start) * LANES;
        let mut product = Product {
            tokens: [&first.lines[lines.clone()], &second.lines[lines]],
            count: (pair.tiles.len() - 1) * LANES + second.count,
            panel: &self.panel[panel..],
            block_lines,
            blocks: pair.blocks.len(),
            chunks: chunks.len(),
            fresh: chunks.start.is_multiple_of(length),
            sums,
            block_sums,
        };
        product.check();
        let element = self.tokens.form.element;
        match self.backend {
            #[cfg(target_arch = "x86_64")]
            Backend::Matrix => registers.multiply(element, product),
            #[cfg(target_arch = "x86_64")]
            Backend::Avx512 | Backend::Avx2 => super::x86::multiply(self.backend, &mut product),
            #[cfg(test)]
            Backend::Emulated => backend::multiply_emulated(element, &mut product),
            _ => backend::multiply_portable(&mut product),
        }
    }

    /// Turns the sums of a section into outputs.
    fn finish(&mut self, strip: &Strip, pair: &Pair, section: usize, turn: usize) {
        let tiles = strip.tiles.len();
        let long = self.goes_on();
        for block in pair.blocks.clone() {
            let at = Section {
                block: strip.blocks.start + block,
                section,
            };
            for tile in pair.tiles.clone() {
                let sums = match long {
                    true => &self.sums[block * tiles + tile],
                    false => &self.scratch[turn][(block - pair.blocks.start) * 2 + tile - pair.tiles.start],
                };
                let out = &mut self.outputs[block * tiles + tile];
                self.source.finish(&at, strip.tiles[tile], sums, out);
            }
        }
    }

    /// Puts a strip's outputs at `rows` of `out`, tokens x `width`.
    fn write(&self, strip: &Strip, rows: Range<usize>, width: usize, out: &mut [f32]) {
        let tiles = strip.tiles.len();
        for (i, square) in self.outputs.iter().enumerate() {
            let (block, tile) = (i / tiles, i % tiles);
            let first = rows.start + block * LANES;
            let length = LANES.min(rows.end - first);
            for (token, values) in square.0[..strip.tiles[tile].count].iter().enumerate() {
                let at = (tile * LANES + token) * width + first;
                out[at..at + length].copy_from_slice(&values[..length]);
            }
        }
    }
}

/// 0..count in runs of two.
fn pairs(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(2).map(move |i| i..(i + 2).min(count))
}

/// The matrix registers, where the backend multiplies by them.
struct Registers {
    #[cfg(target_arch = "x86_64")]
    configured: Option<Configured>,
}

impl Registers {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn new(backend: Backend) -> Registers {
        Registers {
            #[cfg(target_arch = "x86_64")]
            configured: (backend == Backend::Matrix).then(Configured::whole).flatten(),
        }
    }

    /// Multiplies whole tiles. The product has been checked.
    #[cfg(target_arch = "x86_64")]
    fn multiply(&self, element: super::Element, product: Product) {
        let Some(configured) = &self.configured else {
            unreachable!("a set that was found available has its registers")
        };
        let square = size_of::<Square<u32>>();
        let element = match element {
            super::Element::Bf16 => tiles::Element::Bf16,
            super::Element::Byte => tiles::Element::Byte,
        };
        let places = tiles::Square {
            a: product.tokens.map(|lines| lines.as_ptr().cast()),
            b: product.panel.as_ptr().cast(),
            b_next: product.block_lines * size_of::<Line>(),
            c: product.sums.as_mut_ptr().cast(),
            c_tokens: square,
            c_rows: product.block_sums * square,
            count: product.chunks,
        };
        // SAFETY: `check` has compared the lengths, and the registers are configured.
        unsafe { configured.accumulate(element, (product.tiles(), product.blocks), product.fresh, places) }
    }
}
