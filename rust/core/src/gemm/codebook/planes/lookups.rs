//! Table look-up over bit planes: AVX2.
//!
//! A centroid of two bits is `c0 + (c1 - c0) low + (c2 - c0) high + (c3 - c2 - c1 + c0) (low and high)`, whatever the
//! centroids are. So a row's product is that of three rows of bits, two of them stored, the third made by an AND, with
//! integer factors. A product with four bits is looked up in the token's table ([`super::tables`]), 16 rows a lane.
//!
//! A panel is looked up from its first to its last column, one ascending stream of bytes, although the tables of 4096
//! columns fill the first cache: all panels by 2048 or 512 columns at a time took 1.2 times as long from memory on Zen 4.
//! Of several tokens as many are taken at a time as have tables that stay in the second cache.
//!
//! Four looked-up sums of at most 60 fit a byte. Then bytes of both halves of activations become words, `low + 16 high`,
//! and words are added to 32-bit sums after 512 columns, before they overflow: 16 times 16 at most 240 * 17. So sums are
//! exact at any length, in every mode, and the shifted halves of 128 codes take 20 operations, 6 of them look-ups.

// A closure that an iterator calls would be compiled without the instructions.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tables::{Tables, parts};
use crate::formats::codebook::bits::{LANE, REGISTER};
use crate::formats::codebook::{BLOCK_UNIT, Block, PANEL, View};
use crate::gemm::codebook::kernel::AHEAD;
use crate::gemm::codebook::tokens::Prepared;
use crate::gemm::codebook::{Epilogue, Rows};

/// Rows of bits: of low bits, of high ones, and of both.
const MASKS: usize = 3;
/// Lines after which words are added to 32-bit sums.
const CHUNK: usize = 512 / LANE;
/// Bytes of tables that stay in the second cache.
const TABLES: usize = 256 << 10;
/// Looked-up registers whose bytes are added.
const ADDED: usize = 4;

/// For each plane of the centroids, what the sum of all activations and those of each row of bits are multiplied by.
struct Factors<const PLANES: usize>([[[i32; PANEL]; 1 + MASKS]; PLANES]);

impl<const PLANES: usize> Factors<PLANES> {
    #[inline(always)]
    fn new(block: &Block) -> Self {
        let mut factors = [[[0; PANEL]; 1 + MASKS]; PLANES];
        for (plane, factors) in factors.iter_mut().enumerate() {
            let centroids = block.plane(plane).as_chunks::<4>().0;
            for (row, centroids) in centroids.iter().enumerate().take(PANEL) {
                let [c0, c1, c2, c3] = centroids.map(|byte| i32::from(byte as i8));
                factors[0][row] = c0;
                factors[1][row] = c1 - c0;
                factors[2][row] = c2 - c0;
                factors[3][row] = c3 - c2 - c1 + c0;
            }
        }
        Factors(factors)
    }

    /// The rows' sums of centroids times activations. Each fits 32 bits, so that wrapping on the way does no harm.
    #[inline(always)]
    fn sums(&self, total: u32, sums: &[[i32; PANEL]; MASKS]) -> [[i32; PANEL]; PLANES] {
        let mut out = [[0; PANEL]; PLANES];
        for plane in 0..PLANES {
            let factors = &self.0[plane];
            for row in 0..PANEL {
                let mut sum = factors[0][row].wrapping_mul(total as i32);
                for mask in 0..MASKS {
                    sum = sum.wrapping_add(factors[1 + mask][row].wrapping_mul(sums[mask][row]));
                }
                out[plane][row] = sum;
            }
        }
        out
    }
}

/// A tensor's rows of bits with the tokens' tables.
pub(in crate::gemm::codebook) struct Lookups<'a> {
    /// A tensor of 2-bit codes.
    pub view: View<'a>,
    /// With tables.
    pub prepared: &'a Prepared,
    /// The activations' bits, 4 or 8.
    pub activation_bits: u8,
    /// Bytes of a centroid that count.
    pub planes: usize,
}

impl Lookups<'_> {
    /// Adds the products of some rows of an expert to `out`, tokens x rows, for the tokens of `list`.
    ///
    /// # Safety
    /// The processor has AVX2.
    pub unsafe fn multiply(&self, expert: usize, rows: Range<usize>, list: &[usize], out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.planes, parts(self.activation_bits)) {
                (1, 1) => self.rows::<1, 1>(expert, rows, list, out),
                (1, _) => self.rows::<1, 2>(expert, rows, list, out),
                (_, 1) => self.rows::<2, 1>(expert, rows, list, out),
                _ => self.rows::<2, 2>(expert, rows, list, out),
            }
        }
    }

    /// As [`Lookups::multiply`], for activations of `PARTS` halves.
    #[target_feature(enable = "avx2")]
    fn rows<const PLANES: usize, const PARTS: usize>(
        &self,
        expert: usize,
        rows: Range<usize>,
        list: &[usize],
        out: &mut [f32],
    ) {
        let layout = self.view.layout();
        let tile = (TABLES / (layout.padded_columns() * 4 * PARTS).max(1)).max(1);
        for (tile, out) in list.chunks(tile).zip(out.chunks_mut(tile * rows.len())) {
            for row in rows.clone().step_by(PANEL) {
                let mut out = Rows::new(out, rows.len(), row - rows.start);
                for index in 0..layout.blocks() {
                    let block = self.view.block(expert, row / PANEL, index);
                    let first = index * layout.block_size();
                    self.block::<PLANES, PARTS>(&block, first, tile, &mut out);
                }
            }
        }
    }

    /// Adds the products of a block, whose first column is `first`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn block<const PLANES: usize, const PARTS: usize>(
        &self,
        block: &Block,
        first: usize,
        list: &[usize],
        out: &mut Rows,
    ) {
        let (factors, epilogue) = (Factors::<PLANES>::new(block), Epilogue::new(block));
        let lines = block.registers();
        let units = first / BLOCK_UNIT..(first + block.columns()).div_ceil(BLOCK_UNIT);
        for (i, &token) in list.iter().enumerate() {
            let Tables { bytes, totals } = self.prepared.tables(token);
            let tables = bytes[first / LANE * 2 * PARTS..].chunks(CHUNK * 2 * PARTS);
            let mut sums = [[0; PANEL]; MASKS];
            for (lines, tables) in lines.chunks(CHUNK).zip(tables) {
                look_up::<PARTS>(lines, tables, &mut sums);
            }
            let sums = factors.sums(totals[units.clone()].iter().sum(), &sums);
            out.add(i, &epilogue.products(&sums, self.prepared.scale(token)));
        }
    }
}

/// Adds the activations that the bits of some lines choose to the sums of 16 rows. At most [`CHUNK`] lines, a multiple of
/// four; `tables` start with theirs.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const PARTS: usize>(
    lines: &[[u8; REGISTER]],
    tables: &[[u8; 2 * LANE]],
    sums: &mut [[i32; PANEL]; MASKS],
) {
    let half = _mm256_set1_epi8(15);
    // What bytes of low and of high halves, or of earlier and of later columns, count.
    let weights = _mm256_set1_epi16(if PARTS == 2 { 0x1001 } else { 0x0101 });
    let mut words = [[_mm256_setzero_si256(); 2]; MASKS];
    let step = ADDED / PARTS;
    for (lines, tables) in lines
        .chunks_exact(step)
        .zip(tables.chunks_exact(step * 2 * PARTS))
    {
        let mut bytes = [[_mm256_setzero_si256(); 2]; MASKS];
        for line in 0..step {
            _mm_prefetch::<_MM_HINT_T0>(lines[line].as_ptr().wrapping_add(AHEAD).cast());
            for pair in 0..2 {
                // SAFETY: a line has two times 32 bytes.
                let codes = unsafe { _mm256_loadu_si256(lines[line].as_ptr().add(32 * pair).cast()) };
                let shifted = _mm256_srli_epi16::<4>(codes);
                let low = _mm256_and_si256(codes, half);
                let high = _mm256_and_si256(shifted, half);
                let indices = [low, high, _mm256_and_si256(low, high)];
                for part in 0..PARTS {
                    let table = &tables[(2 * line + pair) * PARTS + part];
                    // SAFETY: the array has the 32 bytes.
                    let table = unsafe { _mm256_loadu_si256(table.as_ptr().cast()) };
                    let to = if PARTS == 2 { part } else { line / 2 };
                    for mask in 0..MASKS {
                        let found = _mm256_shuffle_epi8(table, indices[mask]);
                        bytes[mask][to] = _mm256_add_epi8(bytes[mask][to], found);
                    }
                }
            }
        }
        for mask in 0..MASKS {
            let [a, b] = bytes[mask];
            let early = _mm256_maddubs_epi16(_mm256_unpacklo_epi8(a, b), weights);
            let late = _mm256_maddubs_epi16(_mm256_unpackhi_epi8(a, b), weights);
            words[mask][0] = _mm256_add_epi16(words[mask][0], early);
            words[mask][1] = _mm256_add_epi16(words[mask][1], late);
        }
    }
    for mask in 0..MASKS {
        for i in 0..2 {
            let (first, second) = (
                _mm256_cvtepu16_epi32(_mm256_castsi256_si128(words[mask][i])),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(words[mask][i])),
            );
            let at = sums[mask][8 * i..8 * i + 8].as_mut_ptr().cast();
            // SAFETY: the slice has the 32 bytes.
            unsafe {
                let sum = _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_add_epi32(first, second));
                _mm256_storeu_si256(at, sum);
            }
        }
    }
}
