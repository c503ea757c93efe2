//! Table lookup over bit planes with AVX2.
//!
//! The centroid of a code of two bits is `c0 + (c1 - c0) low + (c2 - c0) high + (c3 - c2 - c1 + c0) (low and high)`
//! for any centroids. A row's product is therefore a sum, with integer factors, of the products of three bit masks:
//! two bit planes and their AND. The product of four bits of a mask with activations is looked up in the token's
//! table ([`super::tables`]), for 16 rows in a lane.
//!
//! A row block is read from its first to its last column in one ascending stream of bytes, although the tables of
//! 4096 columns fill the first-level cache: reading all row blocks in strips of 2048 or 512 columns took 1.2 times as
//! long from memory on Zen 4. As many tokens are multiplied together as have tables that fit the second-level cache.
//!
//! Four looked-up sums of at most 60 fit a byte. The bytes of both halves of activations then become words, `low + 16
//! high`, which are added to 32-bit sums every 512 columns, before they overflow: 16 times 16 at most 240 * 17. Sums
//! are thus exact at any length, in every mode. The shifted halves of 128 codes take 20 operations, 6 of which are
//! lookups.

// Closures called by iterators would be compiled without the vector instructions.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tables::{Tables, halves};
use crate::formats::codebook::bits::{LANE, REGISTER};
use crate::formats::codebook::{BLOCK_UNIT, Block, PANEL, View};
use crate::gemm::codebook::kernel::AHEAD;
use crate::gemm::codebook::tokens::Prepared;
use crate::gemm::codebook::{Epilogue, Rows};
use crate::simd::{Isa, Kind};

/// The masks of a row: its low bits, its high bits, and their AND.
const MASKS: usize = 3;
/// The number of lines between additions of words to 32-bit sums.
const CHUNK: usize = 512 / LANE;
/// The bytes of tables that stay in the second-level cache.
const TABLES: usize = 256 << 10;
/// The number of looked-up registers that are added as bytes.
const ADDED: usize = 4;

/// For each byte of the centroids, the factors of the sum of all activations and of the sums of each mask.
struct Factors<const BYTES: usize>([[[i32; PANEL]; 1 + MASKS]; BYTES]);

impl<const BYTES: usize> Factors<BYTES> {
    #[inline(always)]
    fn new(block: &Block) -> Self {
        let mut factors = [[[0; PANEL]; 1 + MASKS]; BYTES];
        for (byte, factors) in factors.iter_mut().enumerate() {
            let centroids = block.plane(byte).as_chunks::<4>().0;
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

    /// The rows' sums of centroids times activations. They fit 32 bits, so intermediate sums may wrap.
    #[inline(always)]
    fn sums(&self, total: u32, sums: &[[i32; PANEL]; MASKS]) -> [[i32; PANEL]; BYTES] {
        let mut out = [[0; PANEL]; BYTES];
        for byte in 0..BYTES {
            let factors = &self.0[byte];
            for row in 0..PANEL {
                let mut sum = factors[0][row].wrapping_mul(total as i32);
                for mask in 0..MASKS {
                    sum = sum.wrapping_add(factors[1 + mask][row].wrapping_mul(sums[mask][row]));
                }
                out[byte][row] = sum;
            }
        }
        out
    }
}

/// A tensor of 2-bit codes with the tables of tokens.
pub(in crate::gemm::codebook) struct Lookups<'a> {
    pub view: View<'a>,
    /// Prepared activations with tables.
    pub prepared: &'a Prepared,
    /// The bits per activation, 4 or 8.
    pub activation_bits: u8,
    /// The number of centroid bytes that are multiplied: 1 (the high byte) or 2.
    pub centroid_bytes: usize,
}

impl Lookups<'_> {
    /// Adds the products of some rows of an expert with `tokens` to `out`, tokens x rows.
    ///
    /// # Panics
    /// If the set is not the one of [`by_tables`](super::by_tables).
    pub fn multiply(&self, isa: Isa, expert: usize, rows: Range<usize>, tokens: &[usize], out: &mut [f32]) {
        assert!(isa.kind() == Kind::Avx2);
        // SAFETY: `isa` proves that the processor has AVX2.
        unsafe {
            match (self.centroid_bytes, halves(self.activation_bits)) {
                (1, 1) => self.rows::<1, 1>(expert, rows, tokens, out),
                (1, _) => self.rows::<1, 2>(expert, rows, tokens, out),
                (_, 1) => self.rows::<2, 1>(expert, rows, tokens, out),
                _ => self.rows::<2, 2>(expert, rows, tokens, out),
            }
        }
    }

    /// Adds products like [`Lookups::multiply`], for activations of `HALVES` halves of a byte.
    #[target_feature(enable = "avx2")]
    fn rows<const BYTES: usize, const HALVES: usize>(
        &self,
        expert: usize,
        rows: Range<usize>,
        tokens: &[usize],
        out: &mut [f32],
    ) {
        let layout = self.view.layout();
        let tile = (TABLES / (layout.padded_columns() * 4 * HALVES).max(1)).max(1);
        for (tile, out) in tokens.chunks(tile).zip(out.chunks_mut(tile * rows.len())) {
            for row in rows.clone().step_by(PANEL) {
                let mut out = Rows::new(out, rows.len(), row - rows.start);
                for index in 0..layout.blocks() {
                    let block = self.view.block(expert, row / PANEL, index);
                    let first = index * layout.block_size();
                    self.block::<BYTES, HALVES>(&block, first, tile, &mut out);
                }
            }
        }
    }

    /// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn block<const BYTES: usize, const HALVES: usize>(
        &self,
        block: &Block,
        first: usize,
        tokens: &[usize],
        out: &mut Rows,
    ) {
        let (factors, epilogue) = (Factors::<BYTES>::new(block), Epilogue::new(block));
        let lines = block.registers();
        let units = first / BLOCK_UNIT..(first + block.columns()).div_ceil(BLOCK_UNIT);
        for (i, &token) in tokens.iter().enumerate() {
            let Tables { bytes, totals } = self.prepared.tables(token);
            let tables = bytes[first / LANE * 2 * HALVES..].chunks(CHUNK * 2 * HALVES);
            let mut sums = [[0; PANEL]; MASKS];
            for (lines, tables) in lines.chunks(CHUNK).zip(tables) {
                look_up::<HALVES>(lines, tables, &mut sums);
            }
            let sums = factors.sums(totals[units.clone()].iter().sum(), &sums);
            out.add(i, &epilogue.products(&sums, self.prepared.scale(token)));
        }
    }
}

/// Adds the activations selected by the masks of some lines to the sums of 16 rows. The number of lines is at most
/// [`CHUNK`] and a multiple of four, and `tables` start with theirs.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up<const HALVES: usize>(
    lines: &[[u8; REGISTER]],
    tables: &[[u8; 2 * LANE]],
    sums: &mut [[i32; PANEL]; MASKS],
) {
    let half = _mm256_set1_epi8(15);
    // The factors of the bytes of low and high halves, or of earlier and later columns.
    let weights = _mm256_set1_epi16(if HALVES == 2 { 0x1001 } else { 0x0101 });
    let mut words = [[_mm256_setzero_si256(); 2]; MASKS];
    let step = ADDED / HALVES;
    for (lines, tables) in lines
        .chunks_exact(step)
        .zip(tables.chunks_exact(step * 2 * HALVES))
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
                for which in 0..HALVES {
                    let table = &tables[(2 * line + pair) * HALVES + which];
                    // SAFETY: the array has the 32 bytes.
                    let table = unsafe { _mm256_loadu_si256(table.as_ptr().cast()) };
                    let to = if HALVES == 2 { which } else { line / 2 };
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
