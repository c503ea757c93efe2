//! The integer kernel for 3 and 4 bits: a block of a panel by N tokens, over any [`Lanes`].
//!
//! Codes become centroids by one byte shuffle a register (the row's codebook is its lane's table), and dot products
//! multiply them by activations that all rows share. A step's codes of all quads lie side by side, so 16 activations are
//! loaded once for 16 rows, the rows' sums are independent chains, and a panel is one ascending stream of bytes.
//!
//! AVX-512, for 16 columns of 16 rows of 4 bits, beside the loads: 6 operations for indices, 4 shuffles a plane and
//! 4 dot products a plane and token. The sums of more than four tokens would not fit the registers beside tables and
//! weights; [`super::pieces`] is for those.

// A closure that an iterator calls would be compiled without the instructions.
#![allow(clippy::needless_range_loop)]

use super::lanes::{AT_ONCE, Lanes};
pub(super) use super::look_up::{AHEAD, Tables, indices};
use super::pieces::{self, Pieces};
use super::tokens::Prepared;
use super::{Epilogue, Rows};
use crate::formats::codebook::bits::{LANE, QUADS, REGISTER, step_columns, step_registers};
use crate::formats::codebook::{Block, PANEL};

/// The integer sums of 16 rows for `N` tokens, by plane.
///
/// Tables come straight from memory: a load that waits for a copy's stores waits for all work before them.
///
/// # Safety
/// The processor runs the set of `V`, the block is of `BITS` bits, and each of `x` points to as many bytes as the block
/// has columns.
#[inline(always)]
unsafe fn sums<V: Lanes, const BITS: u8, const PLANES: usize, const N: usize>(
    block: &Block,
    x: [*const u8; N],
) -> [[[i32; PANEL]; PLANES]; N] {
    let registers = block.registers();
    let quad = step_registers(BITS) * REGISTER;
    let mut out = [[[0; PANEL]; PLANES]; N];
    for pass in 0..V::HALVES {
        let first = pass * PANEL / V::HALVES;
        // SAFETY: a pass takes its share of the rows, each of 2^BITS centroids, and of each step's registers; `x` is the
        // caller's promise.
        unsafe {
            let mut table = [[V::zero(); AT_ONCE]; PLANES];
            for plane in 0..PLANES {
                let centroids = block.plane(plane).as_ptr();
                for i in 0..AT_ONCE {
                    let row = first + i * PANEL / V::HALVES / AT_ONCE;
                    table[plane][i] = V::tables::<BITS>(centroids.add(row << BITS));
                }
            }
            let mut sums = [[[V::zero(); AT_ONCE]; PLANES]; N];
            for step in 0..registers.len() / (QUADS * step_registers(BITS)) {
                let at = registers.as_ptr().cast::<u8>().add(step * QUADS * quad);
                if pass == 0 {
                    for line in 0..QUADS * step_registers(BITS) {
                        V::prefetch(at.wrapping_add(AHEAD + line * REGISTER));
                    }
                }
                let at = at.add(pass * QUADS / V::HALVES * quad);
                for group in 0..step_columns(BITS) / LANE {
                    let mut weights = [[V::zero(); AT_ONCE]; PLANES];
                    for i in 0..AT_ONCE {
                        let half = i % V::HALVES * REGISTER / V::HALVES;
                        let index = indices::<V, BITS>(at.add(i / V::HALVES * quad + half), group);
                        for plane in 0..PLANES {
                            weights[plane][i] = V::look_up(table[plane][i], index);
                        }
                    }
                    for t in 0..N {
                        let x = V::activations(x[t].add(step * step_columns(BITS) + group * LANE));
                        for plane in 0..PLANES {
                            for i in 0..AT_ONCE {
                                sums[t][plane][i] = V::dot(sums[t][plane][i], weights[plane][i], x);
                            }
                        }
                    }
                }
            }
            for t in 0..N {
                for plane in 0..PLANES {
                    V::row_sums(sums[t][plane], out[t][plane].as_mut_ptr().add(first));
                }
            }
        }
    }
    out
}

/// Adds the products of a block, whose first column is `first`, to `out` for the tokens of `list`.
///
/// # Safety
/// The processor runs the set of `V`, and the block is of `BITS` bits.
#[inline(always)]
unsafe fn multiply<V: Lanes, const BITS: u8, const PLANES: usize>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    list: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    if list.len() >= pieces::FEWEST {
        // SAFETY: the caller's.
        return unsafe { pieces::multiply::<V, BITS, PLANES>(block, first, pieces, out) };
    }
    for line in (0..block.parameter_bytes()).step_by(REGISTER) {
        // SAFETY: a prefetch may name any address.
        unsafe { V::prefetch(block.start().wrapping_add(AHEAD + line)) }
    }
    let epilogue = Epilogue::<PLANES>::new(block);
    let columns = first..first + block.columns();
    let mut done = 0;
    macro_rules! tile {
        ($tokens:literal) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = prepared.codes(list[done + t])[columns.clone()].as_ptr();
            }
            // SAFETY: the slices have the block's columns; the rest is the caller's.
            let sums = unsafe { sums::<V, BITS, PLANES, $tokens>(block, x) };
            for t in 0..$tokens {
                let products = epilogue.products(&sums[t], prepared.scale(list[done + t]));
                out.add(done + t, &products);
            }
            done += $tokens;
        }};
    }
    while done < list.len() {
        match (list.len() - done).min(V::WIDEST / PLANES) {
            4.. if V::WIDEST / PLANES >= 4 => tile!(4),
            2.. if V::WIDEST / PLANES >= 2 => tile!(2),
            _ => tile!(1),
        }
    }
}

/// As [`multiply`], for a block of 3 or 4 bits ([`super::planes`] has those of 2); `planes` are 1 or 2.
///
/// # Safety
/// The processor runs the set of `V`.
#[inline(always)]
pub(super) unsafe fn compute<V: Lanes>(
    block: &Block,
    planes: usize,
    first: usize,
    prepared: &Prepared,
    list: &[usize],
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    // SAFETY: the caller's; the bits are the block's.
    unsafe {
        match (block.bits(), planes) {
            (3, 1) => multiply::<V, 3, 1>(block, first, prepared, list, pieces, out),
            (_, 1) => multiply::<V, 4, 1>(block, first, prepared, list, pieces, out),
            (3, _) => multiply::<V, 3, 2>(block, first, prepared, list, pieces, out),
            _ => multiply::<V, 4, 2>(block, first, prepared, list, pieces, out),
        }
    }
}
