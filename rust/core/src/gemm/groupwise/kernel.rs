//! The vector kernel: a block of 16 rows by a tile of N tokens, over any [`Lanes`].
//!
//! One register of codes serves all tokens: its operands are extracted once, and a line of activations (a token's
//! only plane, or one of its three) costs one dot product per four weights of a lane.
//!
//! Operation counts for 32 columns of 16 rows on AVX-512, besides the loads: 4 bits 4 shifts and 8 masks, 3 bits 17,
//! 2 bits 6 and 8, 8 bits none, and 8 dot products per line.
//!
//! A sum is a chain of dependent operations of four or five cycles each, so few lines use several chains. AVX2
//! without dot products of bytes needs no chains: products of a unit's codes below 16 add up in 16 bits, which takes
//! two operations per four columns instead of three.
//!
//! With many lines the loads of their words take as long as the dot products, so sets with enough registers take two
//! blocks at a time, and each word serves both ([`by_pairs`]). Zen 4 starts one 512-bit multiplication per cycle, of
//! bytes or floats: with groups of 64 columns the minimum is 19 cycles per line and block (16 dot products and three
//! multiplications for scaling), while codes are extracted in parallel on other units.

#![allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.

use super::Out;
use super::cursor::{Cursor, PAIR_AHEAD, Weights, ahead};
use super::lanes::Lanes;
use super::tile::{DIGIT, Steps, Tile};
use crate::bits::{self, UNIT};
use crate::formats::groupwise::{BLOCK_ROWS, REGISTER_BYTES};
use crate::simd;

/// The quads (four columns of each row) of a unit.
const QUADS: usize = UNIT / 4;

/// Four codes per lane, one byte each, of a unit whose registers start at `unit`.
///
/// # Safety
/// The unit exists, and the processor supports the set of `V`.
#[inline(always)]
unsafe fn quad<V: Lanes, const BITS: usize>(unit: *const u8, quad: usize) -> V::Int {
    let (word, shift) = bits::place(BITS, quad);
    // SAFETY: the caller guarantees the set and the unit, which has as many registers as a code has bits.
    unsafe {
        let register = |word: usize| V::load(unit.add(word * REGISTER_BYTES));
        match (BITS, quad) {
            (3, 6 | 7) => V::join(register(word), register(2), quad as u32),
            (8, _) => register(word),
            _ => V::extract::<BITS>(register(word), shift),
        }
    }
}

/// The chain of a quad's sum, out of C chains.
#[inline(always)]
const fn chain<V: Lanes, const BITS: usize, const C: usize>(quad: usize) -> usize {
    match (V::IN_PLACE, BITS, quad) {
        // Its high bits are in another word, so it is extracted, and its chain must not be scaled.
        (true, 3, 7) => 0,
        // A chain for each scale, which saves additions.
        (true, 3, _) if C > 2 => quad % 2,
        _ => quad % chains::<V, C>(),
    }
}

/// The power of two by which [`in_place`] scales the codes of a chain's quads, out of C chains; 0 if they are extracted
/// by [`quad`].
#[inline(always)]
const fn scale<V: Lanes, const BITS: usize, const C: usize>(chain: usize) -> u32 {
    match (V::IN_PLACE && V::CHAINS, BITS, C) {
        // The highest codes of a byte do not fit signed bytes.
        (true, 2, 4) if chain < 3 => 2 * chain as u32,
        (true, 3, 2 | 4) => 3 * (chain as u32 % 2),
        _ => 0,
    }
}

/// Four codes per lane like [`quad`], left where they are in their bytes, which saves shifts. Not for quads 6 and 7 of
/// three bits.
///
/// # Safety
/// As [`quad`].
#[inline(always)]
unsafe fn in_place<V: Lanes, const BITS: usize>(unit: *const u8, quad: usize) -> V::Int {
    let (word, shift) = bits::place(BITS, quad);
    // SAFETY: the caller guarantees the set and the unit, which has as many registers as a code has bits.
    unsafe {
        V::mask(
            V::load(unit.add(word * REGISTER_BYTES)),
            (0x0101_0101 * ((1 << BITS) - 1)) << shift,
        )
    }
}

/// Expands the codes of a block: for each four columns, 16 rows x 4 bytes.
///
/// # Safety
/// As [`multiply`]; `to` is valid for writes of `steps.units` x 512 bytes.
#[inline(always)]
unsafe fn expand_bits<V: Lanes, const BITS: usize>(weights: &Weights, steps: &Steps, to: *mut u8) {
    // SAFETY: the caller guarantees the set and the bytes of `to`; steps and units belong to the layout.
    unsafe {
        let cursor = Cursor::<V>::new(weights);
        for step in 0..steps.count {
            for (i, unit) in units_of(steps, step).enumerate() {
                let codes = cursor.unit::<BITS>(step, i);
                for number in 0..QUADS {
                    let at = to.add((unit * QUADS + number) * REGISTER_BYTES);
                    V::store_int(quad::<V, BITS>(codes, number), at);
                }
            }
        }
    }
}

/// Expands the codes of a block: for each four columns, 16 rows x 4 bytes.
///
/// # Safety
/// The processor supports the set of `V`, and `steps` belong to `weights.layout`.
#[inline(always)]
pub(super) unsafe fn expand<V: Lanes>(weights: &Weights, steps: &Steps, to: &mut [u8]) {
    assert!(to.len() == steps.units * UNIT * BLOCK_ROWS);
    let to = to.as_mut_ptr();
    // SAFETY: `to` is large enough, as asserted; the caller guarantees the set and the steps.
    unsafe {
        match weights.layout.bits() {
            2 => expand_bits::<V, 2>(weights, steps, to),
            3 => expand_bits::<V, 3>(weights, steps, to),
            4 => expand_bits::<V, 4>(weights, steps, to),
            _ => expand_bits::<V, 8>(weights, steps, to),
        }
    }
}

/// The units that start in a step: half of the steps of 16 columns have none.
#[inline(always)]
fn units_of(steps: &Steps, step: usize) -> std::ops::Range<usize> {
    let first = |step: usize| (step * steps.columns).div_ceil(UNIT);
    first(step)..first(step + 1).min(steps.units)
}

/// The units that a step reads: two steps of 16 columns share one.
#[inline(always)]
fn units_in(steps: &Steps, step: usize) -> std::ops::Range<usize> {
    let first = step * steps.columns / UNIT;
    first..(first + (steps.columns / UNIT).max(1)).min(steps.units)
}

/// The sums of a step for R blocks and M lines, each in C chains.
type Sums<V, const R: usize, const M: usize, const C: usize> = [[[<V as Lanes>::Int; C]; M]; R];

/// The number of chains in use, out of C.
#[inline(always)]
const fn chains<V: Lanes, const C: usize>() -> usize {
    if V::CHAINS { C } else { 1 }
}

/// The most lines of a tile.
const MOST_LINES: usize = 12;

/// Adds the dot products of quad `QUAD` of a unit of each block. Lines are written out: in a loop, compilers would keep
/// the sums in memory.
///
/// # Safety
/// As [`multiply`]; `units` are the blocks' registers of the unit, and `words` the tile's.
#[inline(always)]
unsafe fn dots<
    V: Lanes,
    const BITS: usize,
    const R: usize,
    const M: usize,
    const C: usize,
    const QUAD: usize,
>(
    units: &[*const u8; R],
    words: *const i32,
    sums: &mut Sums<V, R, M, C>,
) {
    // SAFETY: the caller guarantees the set and the unit; a tile has QUADS * M words per unit.
    unsafe {
        const { assert!(M <= MOST_LINES) }
        let mut codes = [V::int_zero(); R];
        for r in 0..R {
            codes[r] = match scale::<V, BITS, C>(chain::<V, BITS, C>(QUAD)) {
                0 => quad::<V, BITS>(units[r], QUAD),
                _ => in_place::<V, BITS>(units[r], QUAD),
            };
        }
        macro_rules! lines {
            ($($line:literal)*) => {
                $(if $line < M {
                    for r in 0..R {
                        let sum = &mut sums[r][$line][chain::<V, BITS, C>(QUAD)];
                        *sum = V::dot_word::<BITS>(*sum, codes[r], words, QUAD * M + $line);
                    }
                })*
            };
        }
        lines!(0 1 2 3 4 5 6 7 8 9 10 11);
    }
}

/// Returns whether M lines use matrix products.
#[inline(always)]
const fn by_matrix<V: Lanes, const M: usize>() -> bool {
    V::MATRIX && M.is_multiple_of(2)
}

/// Adds the products of quads `QUAD` and `QUAD + 1` of a unit of each block, by matrix products.
///
/// # Safety
/// As [`dots`], and `M` is even.
#[inline(always)]
unsafe fn matrices<
    V: Lanes,
    const BITS: usize,
    const R: usize,
    const M: usize,
    const C: usize,
    const QUAD: usize,
>(
    units: &[*const u8; R],
    words: *const i32,
    sums: &mut Sums<V, R, M, C>,
) {
    // SAFETY: the caller guarantees the set and the unit; a tile has QUADS * M words per unit.
    unsafe {
        for r in 0..R {
            let quads = [
                quad::<V, BITS>(units[r], QUAD),
                quad::<V, BITS>(units[r], QUAD + 1),
            ];
            macro_rules! lines {
                ($($first:literal $second:literal),*) => {
                    $(if $second < M {
                        let pair = [sums[r][$first][0], sums[r][$second][0]];
                        let [first, second] = V::add_matrix(pair, quads, words.add(QUAD * M + $first), M);
                        sums[r][$first][0] = first;
                        sums[r][$second][0] = second;
                    })*
                };
            }
            lines!(0 1, 2 3, 4 5, 6 7, 8 9, 10 11);
        }
    }
}

/// The integer sum of a token's planes as a float, from their chains; each plane is worth 256 of the next.
///
/// # Safety
/// As [`multiply`]; `sums` has at least one plane.
#[inline(always)]
unsafe fn combine<V: Lanes, const BITS: usize, const M: usize, const C: usize>(
    sums: &[[V::Int; C]],
) -> V::Float {
    // SAFETY: the caller guarantees the trait's set.
    unsafe {
        let digit = |chains: &[V::Int; C]| {
            let mut sum = chains[0];
            for chain in 1..C {
                sum = match scale::<V, BITS, C>(chain) {
                    bits if bits > 0 && !by_matrix::<V, M>() => {
                        V::int_add(sum, V::scale_down(chains[chain], bits))
                    }
                    _ => V::int_add(sum, chains[chain]),
                };
            }
            V::to_float(sum)
        };
        let mut total = digit(&sums[0]);
        for plane in &sums[1..] {
            total = V::add_product(digit(plane), total, V::broadcast(&DIGIT));
        }
        total
    }
}

/// Adds the dot products of a unit, the `i`-th that a step reads, of each block.
///
/// # Safety
/// As [`multiply`]; the step has the unit.
#[inline(always)]
unsafe fn add_unit<V: Lanes, const BITS: usize, const R: usize, const M: usize, const C: usize>(
    cursors: &[Cursor<V>; R],
    steps: &Steps,
    (step, i, unit): (usize, usize, usize),
    tile: &Tile,
    sums: &mut Sums<V, R, M, C>,
) {
    // SAFETY: the caller guarantees the set and that the step has the unit; a tile has QUADS * M words per unit.
    unsafe {
        let words = tile.words.as_ptr().cast::<i32>().add(unit * QUADS * M);
        let mut units = [std::ptr::null(); R];
        for r in 0..R {
            units[r] = cursors[r].unit::<BITS>(step, i);
        }
        let mut found = *sums;
        for line in found.as_flattened_mut() {
            for chain in 0..chains::<V, C>() {
                line[chain] = V::begin::<BITS>(line[chain]);
            }
        }
        macro_rules! quads {
            ($($even:literal $odd:literal),*) => {
                $(match by_matrix::<V, M>() {
                    true => matrices::<V, BITS, R, M, C, $even>(&units, words, &mut found),
                    false => {
                        dots::<V, BITS, R, M, C, $even>(&units, words, &mut found);
                        dots::<V, BITS, R, M, C, $odd>(&units, words, &mut found);
                    }
                })*
            };
        }
        // A step of 16 columns uses half of its unit: the first half if its number is even.
        let halves = [
            steps.columns >= UNIT || step % 2 == 0,
            steps.columns >= UNIT || step % 2 == 1,
        ];
        if halves[0] {
            quads!(0 1, 2 3);
        }
        if halves[1] {
            quads!(4 5, 6 7);
        }
        for (line, found) in sums.as_flattened_mut().iter_mut().zip(found.as_flattened()) {
            for chain in 0..chains::<V, C>() {
                line[chain] = V::end::<BITS>(line[chain], found[chain]);
            }
        }
    }
}

/// Multiplies R blocks by a tile of N tokens with M / N planes each; each of `out` gets N x 16 outputs.
///
/// # Safety
/// The processor supports the set of `V`. `steps` belong to the layout of all blocks, which has `BITS` bits, and
/// the tile belongs to `steps` and has N tokens in M lines.
#[inline(always)]
pub(super) unsafe fn multiply<
    V: Lanes,
    const BITS: usize,
    const R: usize,
    const N: usize,
    const M: usize,
    const C: usize,
>(
    weights: &[Weights; R],
    steps: &Steps,
    tile: &Tile,
    out: &mut [Out; R],
) {
    debug_assert_eq!((weights[0].layout.bits(), tile.tokens), (BITS, N));
    // SAFETY: units and steps stay within those of the layout, to which blocks and tile belong: a tile has N scales
    // and sums per step, and each of `out` has 16 floats per token.
    unsafe {
        let mut cursors = [Cursor::<V>::new(&weights[0]); R];
        if R > 1 {
            // Prefetch the next blocks: with few tokens per expert the hardware prefetcher is too late. This saved
            // about a seventh on a layer of 128 experts with 16 tokens each (one thread of Zen 4).
            let bytes = match M < PAIR_LINES {
                true => ahead(PAIR_AHEAD),
                false => R * weights[0].layout.block_bytes(),
            };
            for r in 0..R {
                cursors[r] = Cursor::with(&weights[r], bytes);
            }
        }
        let mut totals = [[V::zero(); N]; R];
        for step in 0..steps.count {
            let mut sums: Sums<V, R, M, C> = [[[V::int_zero(); C]; M]; R];
            for (i, unit) in units_in(steps, step).enumerate() {
                add_unit::<V, BITS, R, M, C>(&cursors, steps, (step, i, unit), tile, &mut sums);
            }
            if by_matrix::<V, M>() {
                for r in 0..R {
                    for line in (0..M).step_by(2) {
                        let [first, second] = V::separate([sums[r][line][0], sums[r][line + 1][0]]);
                        sums[r][line][0] = first;
                        sums[r][line + 1][0] = second;
                    }
                }
            }
            let mut scales = [(V::zero(), V::zero()); R];
            for r in 0..R {
                scales[r] = cursors[r].scales(step);
            }
            for token in 0..N {
                for r in 0..R {
                    let sum = combine::<V, BITS, M, C>(&sums[r][token * (M / N)..(token + 1) * (M / N)]);
                    let at = step * N + token;
                    totals[r][token] = add_step::<V>(totals[r][token], sum, scales[r], tile, at);
                }
            }
        }
        for r in 0..R {
            for token in 0..N {
                V::store(totals[r][token], out[r][token].as_mut_ptr());
            }
        }
    }
}

/// A token's total after adding a step's integer sum; `at` is the position of the step's scale and sum in the tile.
///
/// # Safety
/// The processor supports the set of `V`, and the tile has the position.
#[inline(always)]
pub(super) unsafe fn add_step<V: Lanes>(
    total: V::Float,
    sum: V::Float,
    (scale, offset): (V::Float, V::Float),
    tile: &Tile,
    at: usize,
) -> V::Float {
    // SAFETY: the caller guarantees the set and the position, of which the tile has a scale and a sum.
    unsafe {
        let dot = V::mul(sum, V::broadcast(tile.scales.as_ptr().add(at)));
        let total = V::add_product(total, dot, scale);
        V::add_product(total, offset, V::broadcast(tile.sums.as_ptr().add(at)))
    }
}

/// Lanes whose kernels are functions by themselves, with the instruction set: one for each kind of tile. A single
/// function that contains all of them takes minutes to compile.
pub(super) trait Kernels: Lanes {
    /// [`multiply`].
    ///
    /// # Safety
    /// As there.
    unsafe fn multiply<const BITS: usize, const R: usize, const N: usize, const M: usize, const C: usize>(
        weights: &[Weights; R],
        steps: &Steps,
        tile: &Tile,
        out: &mut [Out; R],
    );
}

/// Implements [`Kernels`] for lanes that need some features.
macro_rules! kernels {
    ($lanes:ty, $features:literal) => {
        impl Kernels for $lanes {
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn multiply<
                const BITS: usize,
                const R: usize,
                const N: usize,
                const M: usize,
                const C: usize,
            >(
                weights: &[Weights; R],
                steps: &Steps,
                tile: &Tile,
                out: &mut [Out; R],
            ) {
                // SAFETY: the function has the features of the lanes; the caller guarantees the rest.
                unsafe { kernel::multiply::<Self, BITS, R, N, M, C>(weights, steps, tile, out) }
            }
        }
    };
}
pub(super) use kernels;

/// Chooses the kernel for the layout's bits and the tile's tokens and lines from a list, which also gives the chains
/// of a sum.
macro_rules! choose {
    ($lanes:ty, $blocks:literal, $weights:expr, $steps:expr, $tile:expr, $out:expr, $tiles:tt) => {
        choose!(@ $lanes, $blocks, $weights, $steps, $tile, $out, 2 $tiles, 3 $tiles, 4 $tiles, 8 $tiles)
    };
    (@ $lanes:ty, $blocks:literal, $weights:expr, $steps:expr, $tile:expr, $out:expr,
        $($bits:literal [$(($tokens:literal $lines:literal $chains:literal))*]),*) => {
        match ($weights[0].layout.bits(), $tile.tokens, $tile.lines()) {
            // SAFETY: the caller guarantees the set, steps and tile; the constants match layout and tile.
            $($(($bits, $tokens, $lines) => unsafe {
                <$lanes>::multiply::<$bits, $blocks, $tokens, $lines, $chains>($weights, $steps, $tile, $out)
            },)*)*
            other => unreachable!("no kernel for (bits, tokens, lines) {other:?}"),
        }
    };
}

/// Multiplies a block by a tile of any number of lines up to [`MOST_LINES`], in loops over lines and tokens: sums are in
/// memory, and one function serves all tiles.
///
/// # Safety
/// As [`compute`]; the layout has `BITS` bits.
#[inline(always)]
pub(super) unsafe fn multiply_in_loops<V: Lanes, const BITS: usize>(
    weights: &Weights,
    steps: &Steps,
    tile: &Tile,
    out: &mut Out,
) {
    let (tokens, lines) = (tile.tokens, tile.lines());
    assert!(lines <= MOST_LINES);
    // SAFETY: the block and the tile belong to the layout, and units and steps stay within it. A tile has QUADS * lines
    // words per unit, and a scale and a sum per step and token. `out` has 16 floats per token.
    unsafe {
        let cursor = Cursor::<V>::new(weights);
        let mut totals = [V::zero(); MOST_LINES];
        for step in 0..steps.count {
            let mut sums = [[V::int_zero()]; MOST_LINES];
            for (i, unit) in units_in(steps, step).enumerate() {
                let words = tile.words.as_ptr().cast::<i32>().add(unit * QUADS * lines);
                let codes = cursor.unit::<BITS>(step, i);
                // A step of 16 columns uses half of its unit.
                let quads = match (steps.columns >= UNIT, step % 2) {
                    (true, _) => 0..QUADS,
                    (false, 0) => 0..QUADS / 2,
                    _ => QUADS / 2..QUADS,
                };
                for number in quads {
                    let codes = quad::<V, BITS>(codes, number);
                    for (line, [sum]) in sums[..lines].iter_mut().enumerate() {
                        *sum = V::dot::<BITS>(*sum, codes, words.add(number * lines + line));
                    }
                }
            }
            let scales = cursor.scales(step);
            for (token, total) in totals[..tokens].iter_mut().enumerate() {
                let planes = &sums[token * tile.planes..(token + 1) * tile.planes];
                let sum = combine::<V, BITS, 1, 1>(planes);
                *total = add_step::<V>(*total, sum, scales, tile, step * tokens + token);
            }
        }
        for (total, out) in totals[..tokens].iter().zip(out.iter_mut()) {
            V::store(*total, out.as_mut_ptr());
        }
    }
}

/// Multiplies a block by a tile.
///
/// # Safety
/// The processor supports the set of `V`, `steps` belong to `weights.layout`, and the tile belongs to `steps`.
#[inline(always)]
pub(super) unsafe fn compute<V: Kernels>(
    weights: &[Weights; 1],
    steps: &Steps,
    tile: &Tile,
    out: &mut [Out; 1],
) {
    choose!(V, 1, weights, steps, tile, out,
        [(1 1 4) (2 2 2) (3 3 1) (4 4 1) (5 5 1) (6 6 1) (7 7 1) (8 8 1) (1 3 1) (2 6 1) (3 9 1) (4 12 1)]);
}

/// The minimum number of lines for which pairs of blocks save loads.
const PAIR_LINES: usize = 4;

/// Returns whether tiles with this number of lines take two blocks at a time: many lines because of their loads, few
/// because they wait for memory. Two ascending streams are faster than one, because each stalls at the end of a page
/// (rows of 2 bits: 1.50 ms for 18 MB, sequentially 1.72; one thread of a Xeon).
pub(super) fn by_pairs(lines: usize) -> bool {
    lines >= PAIR_LINES || !simd::reads_ahead()
}

/// Multiplies two blocks by a tile for which [`by_pairs`] is true.
///
/// # Safety
/// As [`compute`].
#[inline(always)]
pub(super) unsafe fn compute_pair<V: Kernels>(
    weights: &[Weights; 2],
    steps: &Steps,
    tile: &Tile,
    out: &mut [Out; 2],
) {
    choose!(V, 2, weights, steps, tile, out,
        [(1 1 4) (2 2 2) (3 3 1) (4 4 1) (5 5 1) (6 6 1) (7 7 1) (8 8 1) (1 3 1) (2 6 1) (3 9 1) (4 12 1)]);
}
