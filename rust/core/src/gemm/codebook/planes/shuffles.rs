//! Products by 2-bit codes with permutations and dot products: AVX-512.
//!
//! A row's word holds the centroids of four columns, so a dot product with four activations, which all rows share,
//! adds to the sums of 16 rows, and sums need no transposition. 256 codes take 10 operations besides the loads, and
//! four dot products per token and byte of the centroids. Each of these loads its own activations. Many tokens are
//! therefore multiplied by [`crate::gemm::codebook::pieces`], whose registers of four rows share a load.

// Closures called by iterators would be compiled without the vector instructions.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::lines::{Order, Table};
use crate::formats::codebook::bits::{LANE, REGISTER};
use crate::formats::codebook::{Block, PANEL};
use crate::gemm::codebook::kernel::AHEAD;
use crate::gemm::codebook::tokens::Prepared;
use crate::gemm::codebook::{Epilogue, Rows};
use crate::gemm::panel::{LANES, Line};

/// Adds the products of a 2-bit block, whose first column is `first`, with `tokens` to `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::gemm::codebook) fn multiply<const BYTES: usize>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    out: &mut Rows,
) {
    for line in (0..block.parameter_bytes()).step_by(REGISTER) {
        _mm_prefetch::<_MM_HINT_T0>(block.start().wrapping_add(AHEAD + line).cast());
    }
    let epilogue = Epilogue::<BYTES>::new(block);
    let columns = first..first + block.columns();
    let mut done = 0;
    macro_rules! tile {
        ($tokens:literal, $chains:literal) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = prepared.codes(tokens[done + t])[columns.clone()].as_ptr();
            }
            // SAFETY: the slices have the block's columns.
            let sums = unsafe { sums::<BYTES, $tokens, $chains>(block, x) };
            for t in 0..$tokens {
                let products = epilogue.products(&sums[t], prepared.scale(tokens[done + t]));
                out.add(done + t, &products);
            }
            done += $tokens;
        }};
    }
    while done < tokens.len() {
        match tokens.len() - done {
            1 => tile!(1, 4),
            2 | 3 => tile!(2, 2),
            _ => tile!(4, 2),
        }
    }
}

/// The integer sums of 16 rows for `N` tokens and each byte of the centroids, as `CHAINS` independent partial sums
/// each.
///
/// # Safety
/// Each of `x` points to as many bytes as the block has columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
unsafe fn sums<const BYTES: usize, const N: usize, const CHAINS: usize>(
    block: &Block,
    x: [*const u8; N],
) -> [[[i32; PANEL]; BYTES]; N] {
    let (order, mut tables) = (Order::new(false), [Table::new(block, 0); BYTES]);
    if BYTES == 2 {
        tables[1] = Table::new(block, 1);
    }
    let mut sums = [[[_mm512_setzero_si512(); CHAINS]; BYTES]; N];
    for (number, line) in block.registers().iter().enumerate() {
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
        let indices = order.indices(order.words(line));
        for c in 0..4 {
            let mut weights = [_mm512_setzero_si512(); BYTES];
            for byte in 0..BYTES {
                weights[byte] = tables[byte].look_up(&indices, c);
            }
            for t in 0..N {
                // SAFETY: a line stands for 16 of the block's columns, all of which x has.
                let four = unsafe { x[t].add(number * LANE + 4 * c).cast::<i32>().read_unaligned() };
                for byte in 0..BYTES {
                    let sum = &mut sums[t][byte][c % CHAINS];
                    *sum = _mm512_dpbusd_epi32(*sum, _mm512_set1_epi32(four), weights[byte]);
                }
            }
        }
    }
    let mut out = [[[0; PANEL]; BYTES]; N];
    for t in 0..N {
        for byte in 0..BYTES {
            let mut sum = sums[t][byte][0];
            for chain in 1..CHAINS {
                sum = _mm512_add_epi32(sum, sums[t][byte][chain]);
            }
            // SAFETY: 16 sums are 64 bytes.
            unsafe { _mm512_storeu_si512(out[t][byte].as_mut_ptr().cast(), sum) };
        }
    }
    out
}

/// Looks up the high bytes of a 2-bit block from column `first`, four columns per line; zeros after the last column.
/// Rows are in the order of [`crate::gemm::codebook::panels`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::gemm::codebook) fn look_up(block: &Block, first: usize, lines: &mut [Line]) {
    let (order, table) = (Order::new(true), Table::new(block, 0));
    let stored = block.registers().get(first / LANE..).unwrap_or_default();
    let (groups, _) = lines.as_chunks_mut::<{ LANES / 4 }>();
    for (number, group) in groups.iter_mut().enumerate() {
        let Some(line) = stored.get(number) else {
            *group = [Line::ZERO; 4];
            continue;
        };
        _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(AHEAD).cast());
        let indices = order.indices(order.words(line));
        for c in 0..4 {
            let words = table.look_up(&indices, c);
            // SAFETY: a line has 64 bytes and is aligned.
            unsafe { _mm512_store_si512((&raw mut group[c]).cast(), words) }
        }
    }
}
