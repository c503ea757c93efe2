//! Floating point: codes widened to lanes permute a row's 16 values.

use std::arch::x86_64::*;

use super::{groups, load_lane, load_values, prefetch};
use crate::codebook::bits::{LANE, QUAD, REGISTER, step_columns, step_registers};
use crate::codebook::{Block, PANEL};
use crate::gemm::codebook::drive::Unit;
use crate::gemm::codebook::portable::{tree_sum, value_table};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn exact<const BITS: u8>(unit: &Unit, block: &Block, first: usize, out: &mut [f32]) {
    let mut tables = [[0f32; LANE]; PANEL];
    for (row, table) in tables.iter_mut().enumerate() {
        *table = value_table(block, row);
    }
    let count = unit.range.len();
    let token = |i: usize| {
        let at = (unit.range.start + i) * unit.tokens.stride + first;
        unit.tokens.values[at..at + block.columns()].as_ptr()
    };
    let mut i = 0;
    while i < count {
        let out = &mut out[i * PANEL..];
        // SAFETY: the slices that `token` takes its pointers from are as long as the block.
        i += unsafe {
            match count - i {
                1 => values::<BITS, 4, 1>(block, &tables, [token(i)], out),
                2 | 3 => values::<BITS, 4, 2>(block, &tables, [token(i), token(i + 1)], out),
                4..8 => values::<BITS, 4, 4>(block, &tables, [0, 1, 2, 3].map(|t| token(i + t)), out),
                _ => values::<BITS, 2, 8>(
                    block,
                    &tables,
                    [0, 1, 2, 3, 4, 5, 6, 7].map(|t| token(i + t)),
                    out,
                ),
            }
        };
    }
}

/// `N` tokens of all rows, `ROWS` at a time, added to `out`; returns `N`.
///
/// # Safety
/// Each of `x` points to as many values as `block` has columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn values<const BITS: u8, const ROWS: usize, const N: usize>(
    block: &Block,
    tables: &[[f32; LANE]; PANEL],
    x: [*const f32; N],
    out: &mut [f32],
) -> usize {
    for first in (0..PANEL).step_by(ROWS) {
        let mut table = [_mm512_setzero_ps(); ROWS];
        for r in 0..ROWS {
            table[r] = load_values(&tables[first + r]);
        }
        let steps = block.columns() / step_columns(BITS);
        // SAFETY: the caller's promise.
        let sums =
            unsafe { row_values::<BITS, ROWS, N>(block.quad(first / QUAD), steps, first % QUAD, table, x) };
        for r in 0..ROWS {
            for t in 0..N {
                let mut lanes = [0f32; LANE];
                // SAFETY: the array has the 64 bytes.
                unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), sums[r][t]) };
                out[t * PANEL + first + r] += tree_sum(lanes);
            }
        }
    }
    N
}

/// The partial sums of `ROWS` rows of a quad, from row `first` of it on, for `N` tokens.
///
/// # Safety
/// Each of `x` points to as many values as `steps` steps have columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn row_values<const BITS: u8, const ROWS: usize, const N: usize>(
    codes: &[[u8; REGISTER]],
    steps: usize,
    first: usize,
    table: [__m512; ROWS],
    x: [*const f32; N],
) -> [[__m512; N]; ROWS] {
    let mut sums = [[_mm512_setzero_ps(); N]; ROWS];
    let registers = step_registers(BITS);
    for (step, codes) in codes.chunks_exact(registers).take(steps).enumerate() {
        let mut wide = [[_mm512_setzero_si512(); 3]; ROWS];
        for register in 0..registers {
            prefetch(&codes[register]);
            for r in 0..ROWS {
                wide[r][register] =
                    _mm512_cvtepu8_epi32(load_lane(&codes[register].as_chunks().0[first + r]));
            }
        }
        for group in 0..groups(BITS) {
            let at = step * step_columns(BITS) + group * LANE;
            let mut weights = table;
            for r in 0..ROWS {
                weights[r] = _mm512_permutexvar_ps(wide_index::<BITS>(wide[r], group), table[r]);
            }
            for t in 0..N {
                // SAFETY: `at + 16` is at most the columns of `steps` steps, which x has by the caller's promise.
                let x = unsafe { _mm512_loadu_ps(x[t].add(at)) };
                for r in 0..ROWS {
                    sums[r][t] = _mm512_fmadd_ps(weights[r], x, sums[r][t]);
                }
            }
        }
    }
    sums
}

/// Indices of a group from widened registers; permutations look at the low four bits, and tables of fewer entries are
/// repeated, so bits above a code do no harm.
#[inline]
#[target_feature(enable = "avx512f")]
fn wide_index<const BITS: u8>([a, b, c]: [__m512i; 3], group: usize) -> __m512i {
    let four = _mm512_set1_epi32(4);
    match (BITS, group) {
        (2, 1) => _mm512_srli_epi32::<2>(a),
        (2, 2) => _mm512_srli_epi32::<4>(a),
        (2, 3) => _mm512_srli_epi32::<6>(a),
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
