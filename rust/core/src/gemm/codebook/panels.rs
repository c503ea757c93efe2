//! Panels of bytes for AMX ([`crate::gemm::panel`]): the high bytes of centroids, for many tokens in the mode `int8`.
//!
//! A register of looked-up centroids is 4 rows x 16 columns; four of them, from the quads of a row block, become four
//! lines of 16 rows x 4 columns by transposing words within lanes. The rows of a panel and of its sums are therefore
//! in the order 0, 4, 8, 12, 1, 5, ... Sums are exact, and outputs have the same bits as those of the other kernels
//! ([`super::Epilogue`]).

#![allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.

use std::arch::x86_64::*;
use std::ops::Range;

use super::kernel::{self, Tables};
use super::lanes::Lanes;
use super::planes::shuffles;
use super::tokens::Form;
use super::x86::Avx512;
use crate::formats::codebook::bits::{LANE, QUADS, REGISTER, step_columns, step_registers};
use crate::formats::codebook::{Block, View};
use crate::gemm::panel::{Element, LANES, Line, Section, Source, Square, Tile, TokenForm};
use crate::simd::Kind;
use crate::types::{Activations, Shape};

/// The minimum number of tokens of an expert for which panels are faster, measured on 14336 x 4096 on a busy host: 12
/// take 3.7 ms with panels and 3.3 with [`super::pieces`], 16 take 4.06 and 4.18.
pub(super) const FEWEST: usize = 16;
/// The columns of a chunk.
const CHUNK: usize = 4 * LANES;

/// A tensor whose high centroid bytes are decoded into panels.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    view: View<'a>,
    /// Invariant: its set is AVX-512.
    form: Form,
    /// The row blocks of an expert, and the chunks of a column block, stored because divisions in each
    /// [`Source::decode`] take time.
    row_blocks: usize,
    section: usize,
}

impl<'a> Panels<'a> {
    /// Panels of a tensor; the form is that of an integer mode.
    ///
    /// # Panics
    /// If the set of the form is not AVX-512.
    pub fn new(view: View<'a>, form: Form) -> Self {
        assert!(form.isa().kind() == Kind::Avx512);
        let layout = view.layout();
        Panels {
            view,
            form,
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

impl Source for Panels<'_> {
    type Open = ();

    fn shape(&self) -> Shape {
        self.view.layout().shape()
    }

    fn form(&self) -> TokenForm {
        TokenForm {
            element: Element::Byte,
            columns: self.shape().columns,
            section: self.section,
            variant: self.form.variant(),
            factors: 0,
        }
    }

    fn token(&self, x: &Activations, _: usize, token: usize, lane: usize, tile: &mut Tile) {
        let (codes, scale) = self.form.quantized(*x, token);
        tile.scales[lane] = scale;
        for (codes, line) in codes
            .chunks(CHUNK)
            .zip(tile.lines[lane..].iter_mut().step_by(LANES))
        {
            let words = line.0.iter_mut().zip(codes.as_chunks::<4>().0);
            words.for_each(|(word, &four)| *word = u32::from_le_bytes(four));
        }
    }

    fn open(&self, _: usize, _: &mut ()) {}

    fn decode(&self, block: usize, _: &mut (), chunks: Range<usize>, to: &mut [Line]) {
        let length = self.section;
        let mut start = chunks.start;
        while start < chunks.end {
            let index = if start < length { 0 } else { start / length };
            let end = ((index + 1) * length).min(chunks.end);
            let source = self.block(block, index);
            let first = (start - index * length) * CHUNK;
            let lines = &mut to[(start - chunks.start) * LANES..(end - chunks.start) * LANES];
            // SAFETY: `form.isa()` proves that the processor has AVX-512, as `new` asserts; the bits are the block's.
            unsafe {
                match source.bits() {
                    2 => shuffles::look_up(&source, first, lines),
                    3 => look_up::<3>(&source, first, lines),
                    _ => look_up::<4>(&source, first, lines),
                }
            }
            start = end;
        }
    }

    fn finish(&self, section: &Section, tile: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
        let block = self.block(section.block, section.section);
        // SAFETY: `form.isa()` proves that the processor has AVX-512, as `new` asserts.
        unsafe { finish(&block, tile, sums, out) }
    }
}

/// Looks up the columns of a block from column `first`, a multiple of a chunk, four columns per line; zeros after the
/// last.
///
/// # Safety
/// The processor has AVX-512, and the block has `BITS` bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn look_up<const BITS: u8>(block: &Block, first: usize, lines: &mut [Line]) {
    let quad = step_registers(BITS) * REGISTER;
    let mut tables = [_mm512_setzero_si512(); QUADS];
    let (padded, stored) = match BITS {
        4 => (None, block.plane(0)),
        _ => (Some(Tables::<1>::new::<BITS>(block)), &[][..]),
    };
    let rows = padded
        .as_ref()
        .map_or(stored, |tables| tables.0[0].as_flattened());
    for (table, rows) in tables.iter_mut().zip(rows.as_chunks::<REGISTER>().0) {
        // SAFETY: four rows' tables have 64 bytes.
        *table = unsafe { _mm512_loadu_si512(rows.as_ptr().cast()) };
    }
    let registers = block.registers().as_ptr().cast::<u8>();
    for (pair, lines) in lines.as_chunks_mut::<4>().0.chunks_mut(2).enumerate() {
        for half in 0..2 {
            let Some(lines) = lines.get_mut(half) else { break };
            let column = first + (2 * pair + half) * LANE;
            if column >= block.columns() {
                *lines = [Line::ZERO; 4];
                continue;
            }
            // For 4 bits, a constant after the loop is unrolled: shifts by a variable count take two operations.
            let group = match BITS {
                4 => half,
                _ => column % step_columns(BITS) / LANE,
            };
            let step = column / step_columns(BITS);
            let mut found = [_mm512_setzero_si512(); QUADS];
            for i in 0..QUADS {
                // SAFETY: the step exists, because its first column does.
                unsafe {
                    let at = registers.add((step * QUADS + i) * quad);
                    if group % 2 == 0 && group / 2 < step_registers(BITS) {
                        let ahead = kernel::AHEAD + group / 2 * REGISTER;
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead).cast());
                    }
                    let index = kernel::indices::<Avx512, BITS>(at, group);
                    found[i] = _mm512_shuffle_epi8(tables[i], index);
                }
            }
            // SAFETY: the function has the features of the lanes; a line has 64 bytes and is aligned.
            unsafe {
                let words = Avx512::transposed(found);
                for i in 0..QUADS {
                    _mm512_store_si512((&raw mut lines[i]).cast(), words[i]);
                }
            }
        }
    }
}

/// Converts a section's sums to products, like [`super::Epilogue`] for one byte per centroid, and adds them to `out`.
#[target_feature(enable = "avx512f")]
fn finish(block: &Block, tile: &Tile, sums: &Square<u32>, out: &mut Square<f32>) {
    let (scales, zeros) = (block.scales(), block.sums(0));
    // SAFETY: the arrays have 64 bytes each.
    let (scales, zeros) = unsafe {
        (
            _mm512_loadu_ps(scales.as_ptr()),
            _mm512_loadu_si512(zeros.as_ptr().cast()),
        )
    };
    let scales = _mm512_mul_ps(scales, _mm512_set1_ps(256.0));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (token, &(step, zero)) in tile.scales.iter().enumerate() {
        // SAFETY: a row has 64 bytes and is aligned.
        unsafe {
            let sum = _mm512_permutexvar_epi32(order, _mm512_load_si512(sums.0[token].as_ptr().cast()));
            let total = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(zero)));
            let product = _mm512_mul_ps(
                _mm512_cvtepi32_ps(total),
                _mm512_mul_ps(scales, _mm512_set1_ps(step)),
            );
            let at = out.0[token].as_mut_ptr();
            _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), product));
        }
    }
}
