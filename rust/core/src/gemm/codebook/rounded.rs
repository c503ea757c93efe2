//! Panels of bf16 ([`crate::gemm::panel`]): for many tokens, and tensors whose activations are not rounded to
//! integers.
//!
//! A weight is `scale * centroid` rounded to bf16, one of 2^bits values of its row and column block, so decoding is a
//! lookup. The values of 16 rows are computed once per strip ([`Values`]).
//!
//! *3 and 4 bits*: the low and the high bytes of values are two tables of 16 bytes per row, and two byte shuffles of
//! the same codes give both for 16 columns of each row of a register. Interleaved, they form words of two columns;
//! words of the quads of a row block become lines by transposing within lanes, which leaves rows in the order 0, 4,
//! 8, 12, 1, 5, ...; outputs are put into ascending order at the end of a section. The code is generic over
//! [`Lanes`].
//!
//! *2 bits*: codes are stored as bit planes, so a value is selected by logic on whole words: `v0 ^ low & (v0 ^ v1) ^
//! high & (v0 ^ v2) ^ low & high & (v0 ^ v1 ^ v2 ^ v3)`, for 16 rows in ascending order.

use std::ops::Range;

use crate::formats::codebook::bits::{LANE, QUAD, step_columns, step_registers, unpack};
use crate::formats::codebook::{Block, PANEL, View, join};
use crate::gemm::panel::{
    Backend, Element, Instructions, LANES, Line, Section, Source, Square, Tile, TokenForm, bf16, round_token,
};
use crate::hadamard;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd::Kind;
use crate::simd::{Isa, fetch, vectorized};
use crate::types::{Activations, Shape};

/// The columns of a chunk.
const CHUNK: usize = 2 * LANES;

/// The prefetch distance of 2-bit codes, in lines: 6 KB.
const AHEAD: usize = 96;

/// The minimum number of tokens of an expert for which panels are faster.
///
/// AVX2, 14336 x 4096 at 4 bits on two busy cores of a Zen 3, milliseconds of exact products and of panels: 1 token
/// 80 and 20, 4 tokens 120 and 21, 16 tokens 426 and 72, 64 tokens 1880 and 271. AMX and AVX-512: as for group-wise
/// integers.
pub(super) fn fewest(backend: Backend) -> usize {
    match backend.instructions() {
        Instructions::Matrix => 5,
        Instructions::Avx512 => 10,
        _ => 2,
    }
}

/// A tensor that is decoded into panels of bf16.
#[derive(Clone, Copy)]
pub(super) struct Rounded<'a> {
    view: View<'a>,
    /// The instruction set for decoding.
    isa: Isa,
    /// The row blocks of an expert, and the chunks of a column block, stored because divisions in each
    /// [`Source::decode`] take time.
    row_blocks: usize,
    section: usize,
}

impl<'a> Rounded<'a> {
    /// Panels for a backend.
    pub fn new(view: View<'a>, backend: Backend) -> Self {
        let layout = view.layout();
        Rounded {
            view,
            isa: backend.vectors(),
            row_blocks: layout.panels(),
            section: layout.block_size() / CHUNK,
        }
    }

    /// Column block `index` of a row block, counted over all experts.
    fn block(&self, row_block: usize, index: usize) -> Block<'a> {
        self.view
            .block(row_block / self.row_blocks, row_block % self.row_blocks, index)
    }
}

impl Source for Rounded<'_> {
    /// The values of each column block.
    type Open = Vec<Values>;

    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Bf16,
            columns: self.shape().columns,
            section: self.shape().columns.div_ceil(CHUNK).max(1),
            variant: self.view.layout().hadamard(),
            factors: 0,
        }
    }

    fn token(&self, x: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        let (columns, hadamard) = (self.shape().columns, self.view.layout().hadamard());
        let rotate = |values: &mut [f32]| {
            if hadamard > 1 {
                hadamard::rotate(self.isa, values, hadamard);
            }
        };
        round_token(self.isa, x, (token, columns), rotate, lane, tile);
    }

    fn open(&self, block: usize, open: &mut Vec<Values>) {
        open.resize(self.view.layout().blocks(), Values::ZERO);
        for (index, values) in open.iter_mut().enumerate() {
            fill(self.isa, values, &self.block(block, index));
        }
    }

    fn decode(&self, block: usize, open: &mut Vec<Values>, chunks: Range<usize>, to: &mut [Line]) {
        let length = self.section;
        let mut start = chunks.start;
        while start < chunks.end {
            let index = if start < length { 0 } else { start / length };
            let end = ((index + 1) * length).min(chunks.end);
            let lines = &mut to[(start - chunks.start) * LANES..(end - chunks.start) * LANES];
            let first = (start - index * length) * CHUNK;
            let source = self.block(block, index);
            // The kernels rely on this check.
            assert!(first + 2 * lines.len() <= source.columns() && lines.len().is_multiple_of(LANES));
            match source.bits() {
                2 => choose(self.isa, &source, &open[index], first, lines),
                // SAFETY: as asserted; `first` is a number of chunks.
                _ => unsafe { look_up(self.isa, &source, &open[index], first, lines) },
            }
            start = end;
        }
    }

    fn finish(&self, _: &Section, _: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        let sums = sums.floats();
        match self.view.layout().bits() {
            2 => *out = sums,
            _ => {
                for (out, sums) in out.0.iter_mut().zip(&sums.0) {
                    for (word, &sum) in sums.iter().enumerate() {
                        out[row(word)] = sum;
                    }
                }
            }
        }
    }
}

/// The row of a word of a line, for codes of 3 or 4 bits.
const fn row(word: usize) -> usize {
    word % QUAD * QUAD + word / QUAD
}

/// The bf16 values of the codebooks of 16 rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Values {
    /// The low and high bytes of values of 3 and 4 bits, 16 per row.
    bytes: [[[u8; LANE]; PANEL]; 2],
    /// The four XOR terms of 2-bit values, for two columns in each row's word.
    terms: [[u32; PANEL]; 4],
}

impl Values {
    const ZERO: Values = Values {
        bytes: [[[0; LANE]; PANEL]; 2],
        terms: [[0; PANEL]; 4],
    };

    /// Computes the tables of a block.
    #[inline(always)]
    fn fill(&mut self, block: &Block) {
        match block.bits() {
            2 => self.fill_terms(block),
            3 => self.fill_bytes::<8>(block),
            _ => self.fill_bytes::<16>(block),
        }
    }

    #[inline(always)]
    fn fill_bytes<const CLUSTERS: usize>(&mut self, block: &Block) {
        for (row, scale) in block.scales().into_iter().enumerate() {
            let values = rounded::<CLUSTERS>(block, row, scale);
            for (code, value) in values.into_iter().enumerate() {
                let [low, high] = value.to_le_bytes();
                self.bytes[0][row][code] = low;
                self.bytes[1][row][code] = high;
            }
        }
    }

    #[inline(always)]
    fn fill_terms(&mut self, block: &Block) {
        for (row, scale) in block.scales().into_iter().enumerate() {
            let [v0, v1, v2, v3] = rounded::<4>(block, row, scale).map(|v| u32::from(v) * 0x1_0001);
            let terms = [v0, v0 ^ v1, v0 ^ v2, v0 ^ v1 ^ v2 ^ v3];
            terms
                .into_iter()
                .enumerate()
                .for_each(|(i, term)| self.terms[i][row] = term);
        }
    }
}

/// The bf16 values of a row's codebook.
#[inline(always)]
fn rounded<const CLUSTERS: usize>(block: &Block, row: usize, scale: f32) -> [u16; CLUSTERS] {
    let (mut values, mut low) = ([0; CLUSTERS], [0; CLUSTERS]);
    let high = &block.plane(0)[row * CLUSTERS..][..CLUSTERS];
    if block.planes() > 1 {
        low.copy_from_slice(&block.plane(1)[row * CLUSTERS..][..CLUSTERS]);
    }
    for code in 0..CLUSTERS {
        let centroid = join(high[code] as i8, low[code] as i8);
        values[code] = bf16(scale * centroid as f32) as u16;
    }
    values
}

vectorized! {
    /// Fills in the values of a block.
    fn fill(values: &mut Values, block: &Block) = Values::fill;
}

vectorized! {
    /// Decodes a 2-bit block from column `first`, two columns per line.
    fn choose(block: &Block, values: &Values, first: usize, lines: &mut [Line]) = choose_all;
}

#[inline(always)]
fn choose_all(block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
    let stored = &block.registers()[first / LANE..];
    for (i, (codes, lines)) in stored
        .iter()
        .zip(lines.as_chunks_mut::<{ LANE / 2 }>().0)
        .enumerate()
    {
        stored.get(i + AHEAD).into_iter().for_each(|line| fetch(line));
        let bytes = codes.as_chunks::<LANE>().0;
        for half in 0..2 {
            let mut words = [0; PANEL];
            for row in 0..PANEL {
                words[row] = u32::from(bytes[2 * half][row]) | u32::from(bytes[2 * half + 1][row]) << 16;
            }
            for c in 0..4 {
                let line = &mut lines[2 * c + half].0;
                for row in 0..PANEL {
                    // The lowest bits of both columns, each repeated 16 times.
                    let spread = |bits: u32| {
                        let bits = bits & 0x1_0001;
                        (bits << 16).wrapping_sub(bits)
                    };
                    let (low, high) = (spread(words[row] >> c), spread(words[row] >> (4 + c)));
                    line[row] = values.terms[0][row]
                        ^ low & values.terms[1][row]
                        ^ high & values.terms[2][row]
                        ^ low & high & values.terms[3][row];
                }
            }
        }
    }
}

/// Decodes a block of 3 or 4 bits from column `first`, two columns per line.
///
/// # Safety
/// `first` is a multiple of [`CHUNK`], and the lines are whole chunks of the block's columns.
unsafe fn look_up(isa: Isa, block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX-512; the caller guarantees the columns.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => unsafe { vectors::avx512(block, values, first, lines) },
        // SAFETY: `isa` proves that the processor has AVX2; the caller guarantees the columns.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { vectors::avx2(block, values, first, lines) },
        // SAFETY: `isa` proves that the processor has NEON; the caller guarantees the columns.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { vectors::neon(block, values, first, lines) },
        _ => look_up_portable(block, values, first, lines),
    }
}

fn look_up_portable(block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
    let (bits, columns) = (block.bits(), step_columns(block.bits()));
    let steps = block.registers().chunks_exact(QUAD * step_registers(bits));
    let mut codes = vec![0; columns];
    for (chunk, lines) in lines.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let column = first + chunk * CHUNK;
        let Some(step) = steps.clone().nth(column / columns) else {
            return;
        };
        for word in 0..LANES {
            unpack(bits, step, row(word), &mut codes);
            let value = |code: &u8| {
                let bytes = [0, 1].map(|byte: usize| values.bytes[byte][row(word)][usize::from(code & 15)]);
                u32::from(u16::from_le_bytes(bytes))
            };
            let pairs = codes[column % columns..].as_chunks::<2>().0;
            for (line, [even, odd]) in lines.iter_mut().zip(pairs) {
                line.0[word] = value(even) | value(odd) << 16;
            }
        }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod vectors {
    // Closures called by iterators would be compiled without the vector instructions.
    #![allow(clippy::needless_range_loop)]

    use super::*;
    use crate::formats::codebook::bits::{QUADS, REGISTER};
    use crate::gemm::codebook::kernel::{AHEAD, indices};
    use crate::gemm::codebook::lanes::{AT_ONCE, Lanes};
    #[cfg(target_arch = "aarch64")]
    use crate::gemm::codebook::neon::Neon;
    #[cfg(target_arch = "x86_64")]
    use crate::gemm::codebook::x86::{Avx2, Avx512};

    /// Decodes lines like [`super::look_up`], with AVX-512.
    ///
    /// # Safety
    /// The processor has AVX-512. `first` is a multiple of [`CHUNK`], and the block has the columns of the lines.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    pub unsafe fn avx512(block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
        // SAFETY: the function has the features of the lanes, and the bits are the block's; the caller guarantees the
        // columns.
        unsafe {
            match block.bits() {
                3 => look_up::<Avx512, 3>(block, values, first, lines),
                _ => look_up::<Avx512, 4>(block, values, first, lines),
            }
        }
    }

    /// Decodes lines like [`super::look_up`], with AVX2.
    ///
    /// # Safety
    /// The processor has AVX2. `first` is a multiple of [`CHUNK`], and the block has the columns of the lines.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2(block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
        // SAFETY: the function has the features of the lanes, and the bits are the block's; the caller guarantees the
        // columns.
        unsafe {
            match block.bits() {
                3 => look_up::<Avx2, 3>(block, values, first, lines),
                _ => look_up::<Avx2, 4>(block, values, first, lines),
            }
        }
    }

    /// Decodes lines like [`super::look_up`], with NEON.
    ///
    /// # Safety
    /// The processor has NEON. `first` is a multiple of [`CHUNK`], and the block has the columns of the lines.
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "neon")]
    pub unsafe fn neon(block: &Block, values: &Values, first: usize, lines: &mut [Line]) {
        // SAFETY: the function has the features of the lanes that are used, and the bits are the block's; the caller
        // guarantees the columns.
        unsafe {
            match block.bits() {
                3 => look_up::<Neon<false>, 3>(block, values, first, lines),
                _ => look_up::<Neon<false>, 4>(block, values, first, lines),
            }
        }
    }

    /// Decodes lines like [`super::look_up`], with the instructions of `V`.
    ///
    /// # Safety
    /// The processor supports the set of `V`, the block has `BITS` bits, 3 or 4, and the columns of the lines, and
    /// `first` is a multiple of [`CHUNK`].
    #[inline(always)]
    unsafe fn look_up<V: Lanes, const BITS: u8>(
        block: &Block,
        values: &Values,
        first: usize,
        lines: &mut [Line],
    ) {
        let quad = step_registers(BITS) * REGISTER;
        let codes = block.registers().as_ptr().cast::<u8>();
        for pass in 0..V::HALVES {
            let offset = pass * REGISTER / V::HALVES;
            // SAFETY: a register, at `offset`, is a pass's share of the 64 bytes of a quad: of its tables, of its codes in
            // a step that exists because its first column does, and of a line.
            unsafe {
                let mut tables = [[V::zero(); AT_ONCE]; 2];
                for byte in 0..2 {
                    for i in 0..QUADS {
                        let rows = values.bytes[byte].as_ptr().cast::<u8>();
                        tables[byte][i] = V::load(rows.add(i * REGISTER + offset));
                    }
                }
                for (chunk, lines) in lines.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let column = first + chunk * CHUNK;
                    let step = codes.add(column / step_columns(BITS) * QUADS * quad);
                    for half in 0..2 {
                        // For 4 bits, a constant after the loop is unrolled: shifts by a variable count take two
                        // operations.
                        let group = match BITS {
                            4 => half,
                            _ => column % step_columns(BITS) / LANE + half,
                        };
                        let mut words = [[V::zero(); AT_ONCE]; 2];
                        for i in 0..QUADS {
                            let at = step.add(i * quad + offset);
                            if pass == 0 && half == 0 && group / 2 < step_registers(BITS) {
                                V::prefetch(at.wrapping_add(AHEAD + group / 2 * REGISTER));
                            }
                            let index = indices::<V, BITS>(at, group);
                            let low = V::look_up(tables[0][i], index);
                            let high = V::look_up(tables[1][i], index);
                            [words[0][i], words[1][i]] = V::interleave(low, high);
                        }
                        for eight in 0..2 {
                            let transposed = V::transposed(words[eight]);
                            for i in 0..QUADS {
                                let line = &raw mut lines[8 * half + 4 * eight + i];
                                V::store(transposed[i], line.cast::<u8>().add(offset));
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
