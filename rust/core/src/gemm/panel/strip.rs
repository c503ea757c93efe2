//! The work of a thread: the products of some rows with all tokens of a task.

use std::ops::Range;

use super::backend::{self, Product, Start};
use super::tokens::Tokens;
use super::{Backend, Instructions, LANES, Line, Section, Source, Square, Tile};
use crate::gemm::layer::Worker;
#[cfg(target_arch = "x86_64")]
use crate::gemm::tiles::{self, Configured};

/// The chunks of a step: two panels of two blocks, one being decoded and one being multiplied, are 32 KB.
const STEP: usize = 8;
/// The chunks of a step if sums stay in AMX registers: with fewer chunks, decoding and products overlap better.
const SHORT_STEP: usize = 4;
/// The chunks of a block that are decoded between two tiles.
const SLICE: usize = 4;
/// The blocks of a strip for few tokens, which stay in the second-level cache.
const LOW: usize = 2;
/// The blocks of a strip for many tokens: the products per read of a token from beyond that cache.
const HIGH: usize = 16;
/// The maximum bytes of few tokens.
const FEW: usize = 1 << 20;
/// The maximum number of tiles that share a decoded panel: their sums stay in the second-level cache.
const SHARE: usize = 32;

/// The buffers of a thread.
pub(super) struct Thread<'a, S: Source> {
    source: &'a S,
    tokens: &'a Tokens,
    /// The expert of each task.
    experts: &'a [usize],
    backend: Backend,
    panel: Vec<Line>,
    /// The sums of sections that are longer than a step, [blocks, tiles].
    sums: Vec<Square<u32>>,
    /// The sums of two sections of a tile, each of 2 blocks.
    scratch: [[Square<u32>; 2]; 2],
    outputs: Vec<Square<f32>>,
    /// The state of the strip's blocks.
    open: Vec<S::Open>,
}

/// Some blocks of an expert multiplied by some tiles of a task.
struct Strip<'a> {
    /// The blocks, counted over all experts.
    blocks: Range<usize>,
    tiles: &'a [&'a Tile],
    /// The chunks of a step.
    step_chunks: usize,
    /// Whether there is one tile and at most two blocks, so that sums stay in AMX registers from step to step.
    kept: bool,
}

impl Strip<'_> {
    /// The steps of the strip, in ascending order of columns, then of blocks.
    fn steps(&self, chunks: usize) -> impl Iterator<Item = Step> + use<> {
        let (size, blocks) = (self.step_chunks, self.blocks.len());
        let starts = (0..chunks).step_by(size);
        let steps = starts.flat_map(move |first| (0..blocks).step_by(2).map(move |block| (first, block)));
        steps.enumerate().map(move |(i, (first, block))| Step {
            chunks: first..(first + size).min(chunks),
            blocks: block..(block + 2).min(blocks),
            panel: i % 2 * 2 * size * LANES,
        })
    }
}

/// One or two blocks of a strip, over some chunks.
struct Step {
    chunks: Range<usize>,
    blocks: Range<usize>,
    /// The first line of its panel.
    panel: usize,
}

impl Step {
    /// The number of slices, each of which is decoded by one call.
    fn slices(&self) -> usize {
        self.blocks.len() * self.chunks.len().div_ceil(SLICE)
    }
}

/// The chunks of a step that belong to one section.
struct SectionChunks {
    chunks: Range<usize>,
    /// Whether they are the section's first ones.
    first: bool,
    /// Whether they are the section's last ones.
    last: bool,
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
            scratch: [[Square([[0; LANES]; LANES]); 2]; 2],
            outputs: Vec::new(),
            open: Vec::new(),
        }
    }
}

impl<S: Source> Worker for Thread<'_, S> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let tiles = self.tokens.of_task(task);
        let blocks = self.source.shape().rows.div_ceil(LANES);
        let first = self.experts[task] * blocks;
        let registers = Registers::new(self.backend);
        for (share, tiles) in tiles.chunks(SHARE).enumerate() {
            let together = self.source.together();
            let kept = self.backend.keeps_sums() && tiles.len() == 1 && together <= LOW;
            let bytes = tiles.len() * self.tokens.chunks() * LANES * size_of::<Line>();
            let height = if kept || bytes <= FEW { LOW } else { HIGH };
            let height = height.next_multiple_of(together);
            let out = &mut out[share * SHARE * LANES * rows.len()..];
            for start in rows.clone().step_by(height * LANES) {
                let end = (start + height * LANES).min(rows.end);
                let strip = Strip {
                    blocks: first + start / LANES..first + end.div_ceil(LANES),
                    tiles,
                    step_chunks: if kept { SHORT_STEP } else { STEP },
                    kept,
                };
                self.compute(&strip, &registers);
                self.write(&strip, start - rows.start..end - rows.start, rows.len(), out);
            }
        }
    }
}

impl<S: Source> Thread<'_, S> {
    fn compute(&mut self, strip: &Strip, registers: &Registers) {
        let (blocks, tiles) = (strip.blocks.len(), strip.tiles.len());
        self.open
            .resize_with(blocks.max(self.open.len()), S::Open::default);
        self.source
            .open_strip(strip.blocks.clone(), &mut self.open[..blocks]);
        self.panel.resize(4 * strip.step_chunks * LANES, Line::ZERO);
        if self.has_long_sections(strip) {
            self.sums.resize(blocks * tiles, Square([[0; LANES]; LANES]));
        }
        self.outputs.clear();
        self.outputs.resize(blocks * tiles, Square([[0.0; LANES]; LANES]));
        let mut before = None;
        for step in strip.steps(self.tokens.chunks()) {
            self.step(strip, before.as_ref(), Some(&step), registers);
            before = Some(step);
        }
        self.step(strip, before.as_ref(), None, registers);
    }

    /// Multiplies a step by all tiles and decodes the next step between tiles, so that out-of-order execution
    /// overlaps both.
    fn step(&mut self, strip: &Strip, step: Option<&Step>, next: Option<&Step>, registers: &Registers) {
        let tiles = strip.tiles.len();
        let (mut decoded, slices) = (0, next.map_or(0, Step::slices));
        for tile in 0..tiles {
            while let (Some(next), true) = (next, decoded * tiles < slices * (tile + 1)) {
                self.decode(strip, next, decoded);
                decoded += 1;
            }
            if let Some(step) = step {
                self.tile(strip, step, tile, registers);
            }
        }
    }

    /// Decodes a slice of a step.
    fn decode(&mut self, strip: &Strip, step: &Step, slice: usize) {
        let (index, offset) = (slice % step.blocks.len(), slice / step.blocks.len() * SLICE);
        let first = step.chunks.start + offset;
        let chunks = first..(first + SLICE).min(step.chunks.end);
        let line = (index * step.chunks.len() + offset) * LANES;
        let to = &mut self.panel[step.panel + line..][..chunks.len() * LANES];
        let block = step.blocks.start + index;
        let open = &mut self.open[block];
        self.source.decode(strip.blocks.start + block, open, chunks, to);
    }

    /// Whether a section may extend over several steps.
    fn has_long_sections(&self, strip: &Strip) -> bool {
        !strip.step_chunks.is_multiple_of(self.tokens.form.section)
            && self.tokens.chunks() > strip.step_chunks
    }

    /// Multiplies a step by a tile, section by section. A section is finished after the products of the next one have
    /// started, so that out-of-order execution overlaps both; their sums alternate between two buffers.
    fn tile(&mut self, strip: &Strip, step: &Step, tile: usize, registers: &Registers) {
        let (length, chunks) = (self.tokens.form.section, self.tokens.chunks());
        let mut waiting = None;
        let mut start = step.chunks.start;
        for index in 0.. {
            if start == step.chunks.end {
                break;
            }
            let section = start / length;
            let whole = ((section + 1) * length).min(chunks);
            let end = whole.min(step.chunks.end);
            let part = SectionChunks {
                chunks: start..end,
                first: start.is_multiple_of(length),
                last: end == whole,
            };
            self.product(strip, (step, tile), part, index % 2, registers);
            if let Some(section) = waiting.take() {
                self.finish(strip, (step, tile), section, (index + 1) % 2);
            }
            if end == whole {
                waiting = Some(section);
            }
            start = end;
            let last = start == step.chunks.end || self.has_long_sections(strip);
            if let Some(section) = waiting.take_if(|_| last) {
                self.finish(strip, (step, tile), section, index % 2);
            }
        }
    }

    /// Multiplies chunks of a step by a tile.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn product(
        &mut self,
        strip: &Strip,
        (step, tile): (&Step, usize),
        part: SectionChunks,
        buffer: usize,
        registers: &Registers,
    ) {
        let tiles = strip.tiles.len();
        let (sums, block_sums) = match self.has_long_sections(strip) {
            true => (&mut self.sums[step.blocks.start * tiles + tile..], tiles),
            false => (&mut self.scratch[buffer][..], 1),
        };
        let Tile { lines, count, .. } = strip.tiles[tile];
        let block_lines = step.chunks.len() * LANES;
        let panel = step.panel + (part.chunks.start - step.chunks.start) * LANES;
        let mut product = Product {
            tokens: &lines[part.chunks.start * LANES..part.chunks.end * LANES],
            count: *count,
            panel: &self.panel[panel..],
            block_lines,
            blocks: step.blocks.len(),
            chunks: part.chunks.len(),
            sums,
            block_sums,
            start: match (part.first, strip.kept) {
                (true, _) => Start::Zero,
                (false, true) => Start::Kept,
                (false, false) => Start::Stored,
            },
            store: part.last || !strip.kept,
        };
        product.check();
        let element = self.tokens.form.element;
        match self.backend.instructions() {
            #[cfg(target_arch = "x86_64")]
            Instructions::Matrix => registers.multiply(element, product),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 | Instructions::Avx2 => super::x86::multiply(self.backend, &mut product),
            // SAFETY: the backend proves that the processor has NEON.
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => unsafe { super::neon::multiply(&mut product) },
            #[cfg(test)]
            Instructions::Emulated => backend::multiply_emulated(element, &mut product),
            _ => backend::multiply_portable(&mut product),
        }
    }

    /// Turns the sums of a section into outputs.
    fn finish(&mut self, strip: &Strip, (step, tile): (&Step, usize), section: usize, buffer: usize) {
        let tiles = strip.tiles.len();
        let long = self.has_long_sections(strip);
        for (index, block) in step.blocks.clone().enumerate() {
            let at = Section {
                block: strip.blocks.start + block,
                section,
            };
            let sums = match long {
                true => &self.sums[block * tiles + tile],
                false => &self.scratch[buffer][index],
            };
            let out = &mut self.outputs[block * tiles + tile];
            self.source.finish(&at, strip.tiles[tile], sums, out);
        }
    }

    /// Copies a strip's outputs to `rows` of `out`, tokens x `width`.
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

/// The AMX registers of a thread, configured if the backend multiplies by them.
struct Registers {
    #[cfg(target_arch = "x86_64")]
    configured: Option<Configured>,
}

impl Registers {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    fn new(backend: Backend) -> Registers {
        Registers {
            #[cfg(target_arch = "x86_64")]
            configured: (backend.instructions() == Instructions::Matrix)
                .then(Configured::whole)
                .flatten(),
        }
    }

    /// Computes a product, which has been checked, for all 16 tokens of its tile.
    #[cfg(target_arch = "x86_64")]
    fn multiply(&self, element: super::Element, product: Product) {
        let Some(configured) = &self.configured else {
            unreachable!("an available set has its registers")
        };
        let square = size_of::<Square<u32>>();
        let element = match element {
            super::Element::Bf16 => tiles::Element::Bf16,
            super::Element::Byte => tiles::Element::Byte,
        };
        let places = tiles::Square {
            a: product.tokens.as_ptr().cast(),
            b: product.panel.as_ptr().cast(),
            b_next: product.block_lines * size_of::<Line>(),
            c: product.sums.as_mut_ptr().cast(),
            c_next: product.block_sums * square,
            count: product.chunks,
        };
        let sums = match product.start {
            Start::Zero => tiles::Sums::Zero,
            Start::Kept => tiles::Sums::Kept,
            Start::Stored => tiles::Sums::Stored,
        };
        // SAFETY: `Product::check` has compared the lengths, and the registers are configured.
        unsafe { configured.accumulate(element, product.blocks, (sums, product.store), places) }
    }
}
