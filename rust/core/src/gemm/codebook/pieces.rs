//! The integer kernel for many tokens, over any [`Lanes`]: a piece of up to 1024 columns of a block is looked up once
//! into the first-level cache and multiplied there by all tokens.
//!
//! Zen 4 starts one dot product of 64 bytes per cycle, on two pipes; one of them is shared with byte shuffles and
//! shifts. Looking up codes again for every four tokens, as [`super::kernel`] does, therefore takes the time of a
//! quarter of its products. Here the first tokens are multiplied during the lookup, and all others need only loads:
//! 24 products for ten loads.
//!
//! While a piece is multiplied, the next one is prefetched into the second-level cache. Sums are exact, so outputs
//! have the same bits as those of [`super::kernel`].

// Closures called by iterators would be compiled without the vector instructions.
#![allow(clippy::needless_range_loop)]

use super::lanes::{AT_ONCE, Lanes};
use super::look_up::{Tables, indices};
use super::tokens::{Prepared, Token};
use super::{Epilogue, Rows};
use crate::formats::codebook::bits::{LANE, QUADS, REGISTER, step_columns, step_registers};
use crate::formats::codebook::{Block, PANEL};

/// The minimum number of tokens for which this kernel is faster; [`super::kernel`] would look up their codes twice.
pub(super) const FEWEST: usize = 6;
/// The maximum number of columns of a piece: 16 KB of centroids, half of a first-level cache.
const COLUMNS: usize = 1024;

/// 256 bytes, row by row: bytes of 16 rows x 16 columns, or four partial sums of each of 16 rows, or their 16 sums at
/// the start.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Square([i32; PANEL * LANE / 4]);

/// The buffers of a thread.
#[derive(Default)]
pub(super) struct Pieces<'a> {
    tokens: Vec<Token<'a>>,
    centroids: Vec<Square>,
    /// The sums of each byte of a centroid and token, [bytes, tokens].
    sums: Vec<Square>,
}

impl<'a> Pieces<'a> {
    /// Sets the tokens for the following blocks.
    pub fn take(&mut self, prepared: &'a Prepared, tokens: &[usize]) {
        self.tokens.clear();
        let tokens = tokens.iter().map(|&token| prepared.token(token));
        self.tokens.extend(tokens);
    }
}

/// Whether a piece is the first or the last one of its block, and the codes to prefetch during the products of some
/// tokens.
#[derive(Clone, Copy)]
struct Place {
    first: bool,
    last: bool,
    ahead: *const u8,
    /// The bytes to prefetch per square.
    bytes: usize,
}

/// Some columns of a block.
struct Piece {
    /// The first column, counted from the block's first.
    start: usize,
    length: usize,
    /// Whether the piece is the block's last one.
    last: bool,
}

/// Adds the products of a block, whose first column is `first`, with the tokens of [`Pieces::take`] to `out`.
///
/// # Safety
/// The processor supports the set of `V`, and the block has `BITS` bits.
#[inline(always)]
pub(super) unsafe fn multiply<V: Lanes, const BITS: u8, const BYTES: usize>(
    block: &Block,
    first: usize,
    pieces: &mut Pieces,
    out: &mut Rows,
) {
    let tables = Tables::<BYTES>::new::<BITS>(block);
    let Pieces {
        tokens,
        centroids,
        sums,
    } = pieces;
    centroids.resize(COLUMNS / LANE, Square([0; _]));
    sums.resize(BYTES * tokens.len(), Square([0; _]));
    let codes = block.registers().as_ptr().cast::<u8>();
    for (table, sums) in tables.0.iter().zip(sums.chunks_exact_mut(tokens.len())) {
        for start in (0..block.columns()).step_by(COLUMNS) {
            let length = COLUMNS.min(block.columns() - start);
            let last = start + length == block.columns();
            let piece = Piece { start, length, last };
            // SAFETY: the caller guarantees the set and the bits; the piece is part of the block.
            unsafe { add_piece::<V, BITS>(codes, table, first, piece, (tokens, centroids), sums) }
        }
    }
    let epilogue = Epilogue::<BYTES>::new(block);
    for (t, token) in tokens.iter().enumerate() {
        let mut found = [[0; PANEL]; BYTES];
        for (byte, found) in found.iter_mut().enumerate() {
            found.copy_from_slice(&sums[byte * tokens.len() + t].0[..PANEL]);
        }
        out.add(t, &epilogue.products(&found, token.scale));
    }
}

/// Adds the products of a piece to the sums of all tokens, for one byte of the centroids. `codes` and `first` are the
/// codes and the first column of the piece's block.
///
/// # Safety
/// The contract of [`multiply`], and the piece is part of the block.
#[inline(always)]
unsafe fn add_piece<V: Lanes, const BITS: u8>(
    codes: *const u8,
    table: &[[u8; LANE]; PANEL],
    first: usize,
    piece: Piece,
    (tokens, centroids): (&[Token], &mut [Square]),
    sums: &mut [Square],
) {
    let Piece { start, length, last } = piece;
    let squares = &mut centroids[..length / LANE];
    let columns = first + start..first + start + length;
    let size = length * PANEL * usize::from(BITS) / 8;
    let codes = codes.wrapping_add(start * PANEL * usize::from(BITS) / 8);
    // Looking up lines of 2-bit codes takes more registers.
    let beside = if BITS == 2 { V::WIDEST } else { V::BESIDE };
    let tiles = 1 + tokens.len().saturating_sub(beside).div_ceil(V::MOST);
    let (mut tile, mut done) = (0, 0);
    macro_rules! next {
        ($tokens:literal, $kernel:path, $($more:expr),*) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = tokens[done + t].codes[columns.clone()].as_ptr();
            }
            let place = Place {
                first: start == 0,
                last,
                ahead: codes.wrapping_add(size + tile * (size / tiles)),
                bytes: size / tiles / squares.len(),
            };
            let sums = &mut sums[done..done + $tokens];
            // SAFETY: the caller guarantees the set, and a block that has the piece's codes, which are whole steps; the
            // slices have the piece's columns.
            unsafe { $kernel($($more,)* squares, x, place, sums) };
            tile += 1;
            done += $tokens;
        }};
    }
    // Tiles of nearly equal size: dot products of few tokens wait for the previous sums.
    match tokens.len().div_ceil(tiles).min(beside) {
        5 if V::BESIDE >= 5 => next!(5, look_up::<V, BITS, 5>, codes, table),
        4 if V::BESIDE >= 4 => next!(4, look_up::<V, BITS, 4>, codes, table),
        3 if V::BESIDE >= 3 => next!(3, look_up::<V, BITS, 3>, codes, table),
        2 => next!(2, look_up::<V, BITS, 2>, codes, table),
        _ => next!(1, look_up::<V, BITS, 1>, codes, table),
    }
    while tile < tiles {
        match (tokens.len() - done).div_ceil(tiles - tile) {
            6 if V::MOST >= 6 => next!(6, add::<V, 6>,),
            5 if V::MOST >= 5 => next!(5, add::<V, 5>,),
            4 if V::MOST >= 4 => next!(4, add::<V, 4>,),
            3 if V::MOST >= 3 => next!(3, add::<V, 3>,),
            2 => next!(2, add::<V, 2>,),
            _ => next!(1, add::<V, 1>,),
        }
    }
}

/// Looks up a piece into `squares` from its codes and tables, and adds its dot products with `N` tokens to their
/// sums.
///
/// # Safety
/// The processor supports the set of `V`; `codes` are those of all squares, which are whole steps, and each of `x`
/// points to their columns.
#[inline(always)]
unsafe fn look_up<V: Lanes, const BITS: u8, const N: usize>(
    codes: *const u8,
    tables: &[[u8; LANE]; PANEL],
    squares: &mut [Square],
    x: [*const u8; N],
    place: Place,
    sums: &mut [Square],
) {
    let (quad, size) = (step_registers(BITS) * REGISTER, size_of::<V::Int>());
    let groups = step_columns(BITS) / LANE;
    for pass in 0..V::HALVES {
        // SAFETY: a pass takes its share of the tables' rows, of each step's registers and of each square; the
        // caller guarantees the set, the codes and the columns of `x`. A prefetch may use any address.
        unsafe {
            let mut table = [V::zero(); AT_ONCE];
            for i in 0..AT_ONCE {
                table[i] = V::load(tables.as_ptr().cast::<u8>().add((pass * AT_ONCE + i) * size));
            }
            let mut totals = begin::<V, N>(pass, place, sums);
            for step in 0..squares.len() / groups {
                let at = codes.add(step * QUADS * quad + pass * QUADS / V::HALVES * quad);
                for group in 0..groups {
                    let square = step * groups + group;
                    V::prefetch_near(place.ahead.wrapping_add(square * place.bytes));
                    let to = squares.as_mut_ptr().add(square).cast::<u8>();
                    let mut weights = [V::zero(); AT_ONCE];
                    if BITS == 2 {
                        weights = V::line(codes.add(square * REGISTER), tables.as_ptr().cast());
                    }
                    for i in 0..AT_ONCE {
                        if BITS != 2 {
                            let half = i % V::HALVES * REGISTER / V::HALVES;
                            let index = indices::<V, BITS>(at.add(i / V::HALVES * quad + half), group);
                            weights[i] = V::look_up(table[i], index);
                        }
                        V::store(weights[i], to.add((pass * AT_ONCE + i) * size));
                    }
                    dots::<V, N>(weights, x, square, &mut totals);
                }
            }
            end::<V, N>(totals, pass, place, sums);
        }
    }
}

/// Adds the dot products of `N` tokens with a piece that has already been looked up to their sums.
///
/// # Safety
/// The processor supports the set of `V`, and each of `x` points to the columns of all squares.
#[inline(always)]
unsafe fn add<V: Lanes, const N: usize>(
    squares: &mut [Square],
    x: [*const u8; N],
    place: Place,
    sums: &mut [Square],
) {
    let size = size_of::<V::Int>();
    for pass in 0..V::HALVES {
        // SAFETY: a square has `AT_ONCE` registers of each pass; the caller guarantees the set and the columns of `x`.
        // A prefetch may use any address.
        unsafe {
            let mut totals = begin::<V, N>(pass, place, sums);
            for square in 0..squares.len() {
                V::prefetch_near(place.ahead.wrapping_add(square * place.bytes));
                let at = squares.as_ptr().add(square).cast::<u8>();
                let mut weights = [V::zero(); AT_ONCE];
                for i in 0..AT_ONCE {
                    weights[i] = V::load(at.add((pass * AT_ONCE + i) * size));
                }
                dots::<V, N>(weights, x, square, &mut totals);
            }
            end::<V, N>(totals, pass, place, sums);
        }
    }
}

/// Adds the dot products of one square, 16 columns, with `N` tokens to `totals`.
///
/// # Safety
/// The processor supports the set of `V`, and each of `x` points to the columns of the squares up to `square`.
#[inline(always)]
unsafe fn dots<V: Lanes, const N: usize>(
    weights: [V::Int; AT_ONCE],
    x: [*const u8; N],
    square: usize,
    totals: &mut [[V::Int; AT_ONCE]; N],
) {
    for t in 0..N {
        // SAFETY: the caller guarantees the set, and the 16 columns of the square in each of `x`.
        unsafe {
            let x = V::activations(x[t].add(square * LANE));
            for i in 0..AT_ONCE {
                totals[t][i] = V::dot(totals[t][i], weights[i], x);
            }
        }
    }
}

/// The partial sums of a pass before a piece.
///
/// # Safety
/// The processor supports the set of `V`, and `sums` are those of `N` tokens.
#[inline(always)]
unsafe fn begin<V: Lanes, const N: usize>(
    pass: usize,
    place: Place,
    sums: &[Square],
) -> [[V::Int; AT_ONCE]; N] {
    // SAFETY: a square has `AT_ONCE` registers of each pass; the caller guarantees the set.
    unsafe {
        let mut totals = [[V::zero(); AT_ONCE]; N];
        if !place.first {
            for t in 0..N {
                let from = sums[t].0.as_ptr().cast::<u8>();
                for i in 0..AT_ONCE {
                    totals[t][i] = V::load(from.add((pass * AT_ONCE + i) * size_of::<V::Int>()));
                }
            }
        }
        totals
    }
}

/// Stores the partial sums of a pass; after the last piece of a block stores the rows' sums instead, over partial
/// sums that the passes up to this one have read.
///
/// # Safety
/// The contract of [`begin`].
#[inline(always)]
unsafe fn end<V: Lanes, const N: usize>(
    totals: [[V::Int; AT_ONCE]; N],
    pass: usize,
    place: Place,
    sums: &mut [Square],
) {
    for t in 0..N {
        let to = sums[t].0.as_mut_ptr();
        // SAFETY: a square has `AT_ONCE` registers of each pass, of which the sums of rows take a quarter; the caller
        // guarantees the set.
        unsafe {
            if place.last {
                V::row_sums(totals[t], to.add(pass * PANEL / V::HALVES));
                continue;
            }
            for i in 0..AT_ONCE {
                V::store(
                    totals[t][i],
                    to.cast::<u8>().add((pass * AT_ONCE + i) * size_of::<V::Int>()),
                );
            }
        }
    }
}
