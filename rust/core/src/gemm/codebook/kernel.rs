//! The integer kernel for 3 and 4 bits: a block of 16 rows by N tokens, over any [`Lanes`].
//!
//! One byte shuffle per register maps codes to centroids (the row's codebook is its lane's table), and dot products
//! multiply them by activations that all rows share. The codes of a step are contiguous for all quads, so 16
//! activations are loaded once for 16 rows, the rows' sums are independent chains, and a row block is read in one
//! ascending stream.
//!
//! For 16 columns of 16 rows at 4 bits, AVX-512 takes, besides the loads, 6 operations for indices, 4 shuffles per
//! byte of the centroids, and 4 dot products per byte and token. The sums of more than four tokens do not fit the
//! registers beside tables and weights; [`super::pieces`] handles those.

// Closures called by iterators would be compiled without the vector instructions.
#![allow(clippy::needless_range_loop)]

use super::lanes::{AT_ONCE, Lanes};
#[cfg(target_arch = "x86_64")]
pub(super) use super::look_up::Tables;
pub(super) use super::look_up::{AHEAD, indices};
use super::pieces::{self, Pieces};
use super::tokens::Prepared;
use super::{Epilogue, Rows};
use crate::formats::codebook::bits::{LANE, QUADS, REGISTER, step_columns, step_registers};
use crate::formats::codebook::{Block, PANEL};

/// The integer sums of 16 rows for `N` tokens and each byte of the centroids.
///
/// Tables are loaded from the tensor itself: loads from a copy would wait for its stores, which wait for earlier
/// work.
///
/// # Safety
/// The processor supports the set of `V`, the block has `BITS` bits, and each of `x` points to as many bytes as the
/// block has columns.
#[inline(always)]
unsafe fn sums<V: Lanes, const BITS: u8, const BYTES: usize, const N: usize>(
    block: &Block,
    x: [*const u8; N],
) -> [[[i32; PANEL]; BYTES]; N] {
    let registers = block.registers();
    let quad = step_registers(BITS) * REGISTER;
    let mut out = [[[0; PANEL]; BYTES]; N];
    for pass in 0..V::HALVES {
        let first = pass * PANEL / V::HALVES;
        // SAFETY: a pass takes its share of the rows, each with 2^BITS centroids, and of each step's registers; the
        // caller guarantees `x`.
        unsafe {
            let mut table = [[V::zero(); AT_ONCE]; BYTES];
            for byte in 0..BYTES {
                let centroids = block.plane(byte).as_ptr();
                for i in 0..AT_ONCE {
                    let row = first + i * PANEL / V::HALVES / AT_ONCE;
                    table[byte][i] = V::tables::<BITS>(centroids.add(row << BITS));
                }
            }
            let mut sums = [[[V::zero(); AT_ONCE]; BYTES]; N];
            for step in 0..registers.len() / (QUADS * step_registers(BITS)) {
                let at = registers.as_ptr().cast::<u8>().add(step * QUADS * quad);
                if pass == 0 {
                    for line in 0..QUADS * step_registers(BITS) {
                        V::prefetch(at.wrapping_add(AHEAD + line * REGISTER));
                    }
                }
                let at = at.add(pass * QUADS / V::HALVES * quad);
                for group in 0..step_columns(BITS) / LANE {
                    let mut weights = [[V::zero(); AT_ONCE]; BYTES];
                    for i in 0..AT_ONCE {
                        let half = i % V::HALVES * REGISTER / V::HALVES;
                        let index = indices::<V, BITS>(at.add(i / V::HALVES * quad + half), group);
                        for byte in 0..BYTES {
                            weights[byte][i] = V::look_up(table[byte][i], index);
                        }
                    }
                    for t in 0..N {
                        let x = V::activations(x[t].add(step * step_columns(BITS) + group * LANE));
                        for byte in 0..BYTES {
                            for i in 0..AT_ONCE {
                                sums[t][byte][i] = V::dot(sums[t][byte][i], weights[byte][i], x);
                            }
                        }
                    }
                }
            }
            for t in 0..N {
                for byte in 0..BYTES {
                    V::row_sums(sums[t][byte], out[t][byte].as_mut_ptr().add(first));
                }
            }
        }
    }
    out
}

/// Adds the products of a block, whose first column is `first`, with `tokens` to `out`.
///
/// # Safety
/// The processor supports the set of `V`, and the block has `BITS` bits.
#[inline(always)]
unsafe fn multiply<V: Lanes, const BITS: u8, const BYTES: usize>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    if tokens.len() >= pieces::FEWEST {
        // SAFETY: the caller guarantees the set and the bits.
        return unsafe { pieces::multiply::<V, BITS, BYTES>(block, first, pieces, out) };
    }
    for line in (0..block.parameter_bytes()).step_by(REGISTER) {
        // SAFETY: a prefetch may use any address.
        unsafe { V::prefetch(block.start().wrapping_add(AHEAD + line)) }
    }
    let epilogue = Epilogue::<BYTES>::new(block);
    let columns = first..first + block.columns();
    let mut done = 0;
    macro_rules! tile {
        ($tokens:literal) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = prepared.codes(tokens[done + t])[columns.clone()].as_ptr();
            }
            // SAFETY: the slices have the block's columns; the caller guarantees the set and the bits.
            let sums = unsafe { sums::<V, BITS, BYTES, $tokens>(block, x) };
            for t in 0..$tokens {
                let products = epilogue.products(&sums[t], prepared.scale(tokens[done + t]));
                out.add(done + t, &products);
            }
            done += $tokens;
        }};
    }
    while done < tokens.len() {
        match (tokens.len() - done).min(V::WIDEST / BYTES) {
            4.. if V::WIDEST / BYTES >= 4 => tile!(4),
            2.. if V::WIDEST / BYTES >= 2 => tile!(2),
            _ => tile!(1),
        }
    }
}

/// Adds the products of a block of 3 or 4 bits to `out` like [`multiply`], with 1 or 2 bytes of each centroid.
///
/// # Safety
/// The processor supports the set of `V`.
#[inline(always)]
pub(super) unsafe fn compute<V: Lanes>(
    block: &Block,
    centroid_bytes: usize,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    // SAFETY: the caller guarantees the set; the bits are the block's.
    unsafe {
        match (block.bits(), centroid_bytes) {
            (3, 1) => multiply::<V, 3, 1>(block, first, prepared, tokens, pieces, out),
            (_, 1) => multiply::<V, 4, 1>(block, first, prepared, tokens, pieces, out),
            (3, _) => multiply::<V, 3, 2>(block, first, prepared, tokens, pieces, out),
            _ => multiply::<V, 4, 2>(block, first, prepared, tokens, pieces, out),
        }
    }
}
