//! The exact mode with AVX-512: codes, widened to lanes, permute a row's 16 values.

use std::arch::x86_64::*;

use super::load::{load_lane, load_values};
use crate::formats::codebook::bits::{LANE, QUAD, QUADS, REGISTER, step_columns, step_registers};
use crate::formats::codebook::{Block, PANEL};
use crate::gemm::codebook::Rows;
use crate::gemm::codebook::kernel::AHEAD;
use crate::gemm::codebook::planes::lines::{column_shifts, row_words};
use crate::gemm::codebook::portable::{tree_sum, value_table};
use crate::gemm::codebook::tokens::Prepared;

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn exact<const BITS: u8>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    words: &mut Vec<[u32; PANEL]>,
    out: &mut Rows,
) {
    if BITS == 2 {
        row_words(block, words);
    }
    let mut tables = [[0f32; LANE]; PANEL];
    for (row, table) in tables.iter_mut().enumerate() {
        *table = value_table(block, row);
    }
    let columns = first..first + block.columns();
    let mut done = 0;
    macro_rules! tile {
        ($rows:literal, $tokens:literal) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = prepared.values(tokens[done + t])[columns.clone()].as_ptr();
            }
            // SAFETY: the slices have the block's columns.
            let products = unsafe { products::<BITS, $rows, $tokens>(block, words, &tables, x) };
            for t in 0..$tokens {
                out.add(done + t, &products[t]);
            }
            done += $tokens;
        }};
    }
    while done < tokens.len() {
        match tokens.len() - done {
            1 => tile!(8, 1),
            2 | 3 => tile!(4, 2),
            4..8 => tile!(4, 4),
            _ => tile!(2, 8),
        }
    }
}

/// The products of 16 rows with `N` tokens, `ROWS` rows at a time. `words` are the codes of a 2-bit block.
///
/// # Safety
/// Each of `x` points to as many values as `block` has columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn products<const BITS: u8, const ROWS: usize, const N: usize>(
    block: &Block,
    words: &[[u32; PANEL]],
    tables: &[[f32; LANE]; PANEL],
    x: [*const f32; N],
) -> [[f32; PANEL]; N] {
    let mut out = [[0.0; PANEL]; N];
    for first in (0..PANEL).step_by(ROWS) {
        let mut table = [_mm512_setzero_ps(); ROWS];
        for r in 0..ROWS {
            table[r] = load_values(&tables[first + r]);
        }
        // SAFETY: the caller guarantees that each of `x` has the columns of the block, whose codes are read.
        let sums = unsafe {
            match BITS {
                2 => word_sums::<ROWS, N>(words, first, table, x),
                _ => row_sums::<BITS, ROWS, N>(block.registers(), first, table, x),
            }
        };
        for r in 0..ROWS {
            for t in 0..N {
                let mut lanes = [0f32; LANE];
                // SAFETY: the array has the 64 bytes.
                unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), sums[r][t]) };
                out[t][first + r] = tree_sum(lanes);
            }
        }
    }
    out
}

/// The partial sums of `ROWS` rows from row `first` for `N` tokens, for codes of 3 or 4 bits.
///
/// # Safety
/// Each of `x` points to as many values as `registers` have columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn row_sums<const BITS: u8, const ROWS: usize, const N: usize>(
    registers: &[[u8; REGISTER]],
    first: usize,
    table: [__m512; ROWS],
    x: [*const f32; N],
) -> [[__m512; N]; ROWS] {
    let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
    let quad = step_registers(BITS);
    for (step, codes) in registers.chunks_exact(QUADS * quad).enumerate() {
        if first == 0 {
            for register in codes {
                _mm_prefetch::<_MM_HINT_T0>(register.as_ptr().wrapping_add(AHEAD).cast());
            }
        }
        for r in 0..ROWS {
            let (at, lane) = ((first + r) / QUAD * quad, (first + r) % QUAD);
            let mut wide = [_mm512_setzero_si512(); 3];
            for register in 0..quad {
                wide[register] = _mm512_cvtepu8_epi32(load_lane(&codes[at + register].as_chunks().0[lane]));
            }
            for group in 0..step_columns(BITS) / LANE {
                let weights = _mm512_permutexvar_ps(wide_index::<BITS>(wide, group), table[r]);
                for t in 0..N {
                    let at = step * step_columns(BITS) + group * LANE;
                    // SAFETY: `at + 16` is at most the columns of the steps, which x has, as the caller guarantees.
                    let x = unsafe { _mm512_loadu_ps(x[t].add(at)) };
                    sums[r][t] = _mm512_fmadd_ps(weights, x, sums[r][t]);
                }
            }
        }
    }
    sums
}

/// The partial sums of `ROWS` rows from row `first` for `N` tokens, for 2-bit codes in words of 16 columns.
///
/// # Safety
/// Each of `x` points to as many values as `words` have columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn word_sums<const ROWS: usize, const N: usize>(
    words: &[[u32; PANEL]],
    first: usize,
    table: [__m512; ROWS],
    x: [*const f32; N],
) -> [[__m512; N]; ROWS] {
    let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
    let shifts = column_shifts();
    for (number, words) in words.iter().enumerate() {
        for r in 0..ROWS {
            let index = _mm512_srlv_epi32(_mm512_set1_epi32(words[first + r] as i32), shifts);
            let weights = _mm512_permutexvar_ps(index, table[r]);
            for t in 0..N {
                // SAFETY: there are 16 columns per word, which x has, as the caller guarantees.
                let x = unsafe { _mm512_loadu_ps(x[t].add(number * LANE)) };
                sums[r][t] = _mm512_fmadd_ps(weights, x, sums[r][t]);
            }
        }
    }
    sums
}

/// The indices of a group from widened registers. Permutations read the low four bits, and smaller tables are
/// repeated, so the bits above a code have no effect.
#[inline]
#[target_feature(enable = "avx512f")]
fn wide_index<const BITS: u8>([a, b, c]: [__m512i; 3], group: usize) -> __m512i {
    let four = _mm512_set1_epi32(4);
    match (BITS, group) {
        (4, 1) => _mm512_srli_epi32::<4>(a),
        (3, 1) => _mm512_srli_epi32::<3>(a),
        (3, 2) => b,
        (3, 3) => _mm512_srli_epi32::<3>(b),
        (3, 4) => c,
        (3, 5) => _mm512_srli_epi32::<3>(c),
        (3, 6) => {
            _mm512_ternarylogic_epi32::<0xF8>(_mm512_srli_epi32::<6>(a), _mm512_srli_epi32::<4>(c), four)
        }
        (3, 7) => {
            _mm512_ternarylogic_epi32::<0xF8>(_mm512_srli_epi32::<6>(b), _mm512_srli_epi32::<5>(c), four)
        }
        _ => a,
    }
}
