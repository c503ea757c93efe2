//! Integer sums: byte shuffles look centroids up, `vpdpbusd` multiplies them by activations.

use std::arch::x86_64::*;

use super::{Buffers, Line, groups, load, prefetch};
use crate::codebook::bits::{LANE, QUAD, QUADS, REGISTER, step_columns, step_registers};
use crate::codebook::{Block, PANEL};
use crate::gemm::codebook::Epilogue;
use crate::gemm::codebook::drive::Unit;

/// Most groups of 16 columns of a step.
const MAX_GROUPS: usize = 8;
/// More tokens than this share the look-up of centroids through a buffer.
const DIRECT_TOKENS: usize = 4;
/// Most tokens of a pass: 6 over the buffer are 24 accumulators of 32 registers.
const MAX_TOKENS: usize = 6;

/// Codes as bytes below 16, by group, from the registers of a quad's step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn indices<const BITS: u8>(registers: &[[u8; REGISTER]]) -> [__m512i; MAX_GROUPS] {
    let mut found = [_mm512_setzero_si512(); MAX_GROUPS];
    let a = load(&registers[0]);
    // Shifts of 16-bit words: the mask drops what comes from the neighbour.
    match BITS {
        2 => {
            let mask = _mm512_set1_epi8(3);
            found[0] = _mm512_and_si512(a, mask);
            found[1] = _mm512_and_si512(_mm512_srli_epi16::<2>(a), mask);
            found[2] = _mm512_and_si512(_mm512_srli_epi16::<4>(a), mask);
            found[3] = _mm512_and_si512(_mm512_srli_epi16::<6>(a), mask);
        }
        3 => {
            let (b, c) = (load(&registers[1]), load(&registers[2]));
            let (mask, two, one) = (_mm512_set1_epi8(7), _mm512_set1_epi8(3), _mm512_set1_epi8(4));
            for (i, r) in [a, b, c].into_iter().enumerate() {
                found[2 * i] = _mm512_and_si512(r, mask);
                found[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16::<3>(r), mask);
            }
            // The ternary function 0xF8 is a | (b & c).
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(c), one);
            found[6] = _mm512_ternarylogic_epi32::<0xF8>(high, _mm512_srli_epi16::<6>(a), two);
            let high = _mm512_and_si512(_mm512_srli_epi16::<5>(c), one);
            found[7] = _mm512_ternarylogic_epi32::<0xF8>(high, _mm512_srli_epi16::<6>(b), two);
        }
        _ => {
            let mask = _mm512_set1_epi8(15);
            found[0] = _mm512_and_si512(a, mask);
            found[1] = _mm512_and_si512(_mm512_srli_epi16::<4>(a), mask);
        }
    }
    found
}

/// The shuffle tables of a plane: one register a quad.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
fn tables(block: &Block, plane: usize) -> [__m512i; QUADS] {
    let size = QUAD * block.clusters();
    let mut order = [0u8; REGISTER];
    for (i, at) in order.iter_mut().enumerate() {
        *at = (i / LANE * size / QUAD + i % LANE % (size / QUAD)) as u8;
    }
    let order = load(&order);
    let mut found = [order; QUADS];
    for quad in 0..QUADS {
        found[quad] = _mm512_permutexvar_epi8(order, load(&block.quad_centroids(plane, quad)));
    }
    found
}

/// The rows' sums of a panel's accumulators, each of which is 4 rows x 4 partial sums.
#[inline]
#[target_feature(enable = "avx512f")]
fn row_sums(sums: [__m512i; QUADS]) -> [i32; PANEL] {
    let [a, b, c, d] = sums;
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    // Lane l now holds the sums of row l of each quad.
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let mut rows = [0i32; PANEL];
    // SAFETY: the array has the 64 bytes.
    unsafe { _mm512_storeu_si512(rows.as_mut_ptr().cast(), _mm512_permutexvar_epi32(order, all)) };
    rows
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn integer<const BITS: u8, const PLANES: usize>(
    unit: &Unit,
    block: &Block,
    first: usize,
    buffers: &mut Buffers,
    out: &mut [f32],
) {
    let count = unit.range.len();
    let token = |i: usize| {
        let at = (unit.range.start + i) * unit.tokens.stride + first;
        unit.tokens.codes[at..at + block.columns()].as_ptr()
    };
    let steps = block.columns() / step_columns(BITS);
    let mut shuffles = [[_mm512_setzero_si512(); QUADS]; PLANES];
    for plane in 0..PLANES {
        shuffles[plane] = tables(block, plane);
    }
    let epilogue = Epilogue::<PLANES>::new(block);
    let mut sums = [[[0; PANEL]; PLANES]; MAX_TOKENS];
    if count > DIRECT_TOKENS {
        for plane in 0..PLANES {
            look_up::<BITS>(block, &shuffles[plane], &mut buffers.planes[plane]);
        }
    }
    let mut i = 0;
    while i < count {
        // SAFETY: the slices that `token` takes its pointers from are as long as the block.
        let n = unsafe {
            match count - i {
                n if count > DIRECT_TOKENS => match n {
                    6.. => {
                        buffered::<PLANES, 6>(buffers, [0, 1, 2, 3, 4, 5].map(|t| token(i + t)), &mut sums)
                    }
                    3.. => buffered::<PLANES, 3>(buffers, [0, 1, 2].map(|t| token(i + t)), &mut sums),
                    _ => buffered::<PLANES, 1>(buffers, [token(i)], &mut sums),
                },
                1 => direct::<BITS, PLANES, 1>(block, steps, &shuffles, [token(i)], &mut sums),
                2 | 3 => direct::<BITS, PLANES, 2>(
                    block,
                    steps,
                    &shuffles,
                    [0, 1].map(|t| token(i + t)),
                    &mut sums,
                ),
                _ => direct::<BITS, PLANES, 4>(
                    block,
                    steps,
                    &shuffles,
                    [0, 1, 2, 3].map(|t| token(i + t)),
                    &mut sums,
                ),
            }
        };
        for (t, sums) in sums[..n].iter().enumerate() {
            let token = unit.tokens.scales[unit.range.start + i + t];
            for row in 0..PANEL {
                let mut parts = [0; PLANES];
                for plane in 0..PLANES {
                    parts[plane] = sums[plane][row];
                }
                out[(i + t) * PANEL + row] += epilogue.product(row, parts, token);
            }
        }
        i += n;
    }
}

/// `N` tokens straight from the codes; returns `N`.
///
/// # Safety
/// Each of `x` points to as many bytes as `steps` steps have columns, and each quad of `block` has `steps` steps.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn direct<const BITS: u8, const PLANES: usize, const N: usize>(
    block: &Block,
    steps: usize,
    tables: &[[__m512i; QUADS]; PLANES],
    x: [*const u8; N],
    out: &mut [[[i32; PANEL]; PLANES]; MAX_TOKENS],
) -> usize {
    let mut sums = [[[_mm512_setzero_si512(); QUADS]; PLANES]; N];
    for quad in 0..QUADS {
        let mut table = [_mm512_setzero_si512(); PLANES];
        for plane in 0..PLANES {
            table[plane] = tables[plane][quad];
        }
        // SAFETY: the caller's promise.
        let found = unsafe { quad_sums::<BITS, PLANES, N>(block.quad(quad), steps, table, x) };
        for t in 0..N {
            for plane in 0..PLANES {
                sums[t][plane][quad] = found[t][plane];
            }
        }
    }
    for t in 0..N {
        for plane in 0..PLANES {
            out[t][plane] = row_sums(sums[t][plane]);
        }
    }
    N
}

/// The partial sums of a quad's rows for `N` tokens. Sums alternate between two accumulators: one alone would wait for
/// itself.
///
/// # Safety
/// As [`direct`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn quad_sums<const BITS: u8, const PLANES: usize, const N: usize>(
    codes: &[[u8; REGISTER]],
    steps: usize,
    table: [__m512i; PLANES],
    x: [*const u8; N],
) -> [[__m512i; PLANES]; N] {
    let mut sums = [[[_mm512_setzero_si512(); 2]; PLANES]; N];
    let registers = step_registers(BITS);
    for (step, codes) in codes.chunks_exact(registers).take(steps).enumerate() {
        for register in codes {
            prefetch(register);
        }
        let found = indices::<BITS>(codes);
        for group in 0..groups(BITS) {
            let at = step * step_columns(BITS) + group * LANE;
            for plane in 0..PLANES {
                let weights = _mm512_shuffle_epi8(table[plane], found[group]);
                for t in 0..N {
                    // SAFETY: `at + 16` is at most the columns of `steps` steps, which x has by the caller's promise.
                    let lane = unsafe { _mm_loadu_si128(x[t].add(at).cast()) };
                    let sum = &mut sums[t][plane][group % 2];
                    *sum = _mm512_dpbusd_epi32(*sum, _mm512_broadcast_i32x4(lane), weights);
                }
            }
        }
    }
    let mut totals = [[_mm512_setzero_si512(); PLANES]; N];
    for t in 0..N {
        for plane in 0..PLANES {
            totals[t][plane] = _mm512_add_epi32(sums[t][plane][0], sums[t][plane][1]);
        }
    }
    totals
}

/// Writes a plane of a block's centroids as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn look_up<const BITS: u8>(block: &Block, tables: &[__m512i; QUADS], out: &mut Vec<[Line; QUADS]>) {
    out.resize(block.columns() / LANE, [Line([0; REGISTER]); QUADS]);
    for quad in 0..QUADS {
        let steps = block.quad(quad).chunks_exact(step_registers(BITS));
        for (codes, out) in steps.zip(out.chunks_exact_mut(groups(BITS))) {
            for register in codes {
                prefetch(register);
            }
            let found = indices::<BITS>(codes);
            for (group, out) in out.iter_mut().enumerate() {
                let weights = _mm512_shuffle_epi8(tables[quad], found[group]);
                // SAFETY: the line has the 64 bytes, aligned to 64.
                unsafe { _mm512_store_si512(out[quad].0.as_mut_ptr().cast(), weights) };
            }
        }
    }
}

/// `N` tokens from the bytes of [`look_up`]; returns `N`.
///
/// # Safety
/// Each of `x` points to as many bytes as the block that was looked up has columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn buffered<const PLANES: usize, const N: usize>(
    buffers: &Buffers,
    x: [*const u8; N],
    out: &mut [[[i32; PANEL]; PLANES]; MAX_TOKENS],
) -> usize {
    for plane in 0..PLANES {
        // SAFETY: the caller's promise.
        let sums = unsafe { panel_sums(&buffers.planes[plane], x) };
        for t in 0..N {
            out[t][plane] = row_sums(sums[t]);
        }
    }
    N
}

/// The partial sums of a panel for `N` tokens.
///
/// # Safety
/// Each of `x` points to 16 bytes for each of `weights`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn panel_sums<const N: usize>(weights: &[[Line; QUADS]], x: [*const u8; N]) -> [[__m512i; QUADS]; N] {
    let mut sums = [[_mm512_setzero_si512(); QUADS]; N];
    for (group, lines) in weights.iter().enumerate() {
        let weights = [
            load(&lines[0].0),
            load(&lines[1].0),
            load(&lines[2].0),
            load(&lines[3].0),
        ];
        for t in 0..N {
            // SAFETY: the caller's promise.
            let lane = unsafe { _mm_loadu_si128(x[t].add(group * LANE).cast()) };
            let x = _mm512_broadcast_i32x4(lane);
            for quad in 0..QUADS {
                sums[t][quad] = _mm512_dpbusd_epi32(sums[t][quad], x, weights[quad]);
            }
        }
    }
    sums
}
