//! The kernel: a block of 16 rows by a tile of N tokens, over any [`Lanes`].
//!
//! One register of codes serves all tokens: extracting its operands is paid once, and a line of activations (a token's
//! only plane, or one of its three) costs a dot product for four weights a lane.
//!
//! Counts for 32 columns of 16 rows on AVX-512, beside the loads: 4 bits 4 shifts and 8 masks, 3 bits 17, 2 bits 6
//! and 8, 8 bits none, and 8 dot products a line.
//!
//! A sum is a chain of dependent operations of four or five cycles each. So few lines add up in several chains. AVX2
//! without dot products of bytes needs none: there, products of a unit's codes below 16 add up in 16 bits, which takes
//! two operations for four columns instead of three.
//!
//! With many lines the loads of their words take as long as the dot products, so that sets with registers enough take
//! two blocks at a time, and each word serves both ([`by_pairs`]). Zen 4 starts one operation of 512 bits a cycle that
//! multiplies, be it of bytes or floats: with groups of 64 columns 19 cycles a line and block are the least (16 dot
//! products, and three multiplications that scale), while extracting codes goes beside them on other units.

#![allow(clippy::needless_range_loop)] // Registers in arrays: an index says best which.

use super::lanes::Lanes;
use super::tile::{DIGIT, Steps, Tile};
use super::{Out, STEP_COLUMNS};
use crate::bits::{self, UNIT};
use crate::formats::groupwise::{BLOCK_ROWS, Layout, ParameterType, REGISTER_BYTES};
use crate::simd;

/// Quads (four columns of each row) of a unit.
const QUADS: usize = UNIT / 4;
/// How far ahead of the bytes in use memory is asked for, in bytes, where that is faster than leaving it to the processor.
///
/// A block is one ascending stream, parameters and codes in turn. On Zen 4 two threads read it at 98% of the speed of
/// plain sums without asking, and at 92% with; on Xeons 1 to 2 KB ahead gave up to a quarter, as on Zen 3.
const AHEAD: usize = 1536;
/// As [`AHEAD`], where two blocks are read side by side for few lines.
const PAIR_AHEAD: usize = 2560;

/// How far ahead memory is asked for: so far, or not at all where the processor does without.
fn ahead(bytes: usize) -> usize {
    if simd::reads_ahead() { 0 } else { bytes }
}

/// Where a kernel reads weights.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    /// The bytes of the rows, as many as `layout` says.
    pub block: &'a [u8],
    pub layout: Layout,
}

/// Places in a block while a kernel walks through it, step by step.
#[derive(Clone, Copy)]
pub(super) struct Cursor<V: Lanes> {
    codes: *const u8,
    parameters: *const u8,
    /// Bytes of a record.
    record: usize,
    /// A step's record is its number shifted so far; its place in the record the rest, masked.
    shift: u32,
    mask: usize,
    /// Bytes from a step's parameters, and from its codes, to the next one's in the same record.
    strides: [usize; 2],
    ahead: usize,
    symmetric: bool,
    half_range: f32,
    bf16: bool,
    lanes: std::marker::PhantomData<V>,
}

impl<V: Lanes> Cursor<V> {
    /// A block with columns starts with a record's parameters, of 2 bytes each, followed by registers of 16 lanes. One
    /// without columns has no steps, so that nothing is read.
    ///
    /// # Safety
    /// The block is as long as the layout says.
    #[inline(always)]
    pub unsafe fn new(weights: &Weights) -> Self {
        // SAFETY: the caller's.
        unsafe { Cursor::with(weights, ahead(AHEAD)) }
    }

    /// As [`Cursor::new`], memory being asked for `ahead` bytes ahead, or not at all.
    ///
    /// # Safety
    /// As [`Cursor::new`].
    #[inline(always)]
    unsafe fn with(weights: &Weights, ahead: usize) -> Self {
        let (spec, record) = (weights.layout.spec(), weights.layout.record());
        // All steps of a whole row are of its only record and share its parameters; two groups of 16 share a unit.
        let (shift, mask, columns) = match spec.group {
            0 => (usize::BITS - 1, usize::MAX, STEP_COLUMNS),
            group => (record.groups as u32 - 1, record.groups - 1, group),
        };
        let parameters = if spec.group == 0 { 0 } else { record.group_bytes };
        Cursor {
            codes: weights.block.as_ptr().wrapping_add(record.parameter_bytes),
            parameters: weights.block.as_ptr(),
            record: record.bytes,
            shift,
            mask,
            strides: [
                parameters,
                columns / UNIT * weights.layout.bits() * REGISTER_BYTES,
            ],
            ahead,
            symmetric: spec.symmetric,
            half_range: -((1u32 << (spec.bits - 1)) as f32),
            bf16: spec.parameters == ParameterType::Bf16,
            lanes: std::marker::PhantomData,
        }
    }

    /// Where a step's parameters and codes start, from those of the first one.
    #[inline(always)]
    fn places(&self, step: usize) -> [usize; 2] {
        let record = (step >> self.shift) * self.record;
        self.strides.map(|stride| record + (step & self.mask) * stride)
    }

    /// The codes of a step; of a group of 16 columns, those of the unit that it is half of.
    ///
    /// # Safety
    /// The step exists.
    #[inline(always)]
    pub unsafe fn codes(&self, step: usize) -> *const u8 {
        // SAFETY: the caller's step exists, so its codes do.
        unsafe { self.codes.add(self.places(step)[1]) }
    }

    /// Scales and offsets of a step.
    ///
    /// # Safety
    /// The step exists, and the processor runs the set of `V`.
    #[inline(always)]
    pub unsafe fn scales(&self, step: usize) -> (V::Float, V::Float) {
        // SAFETY: the caller's step exists, so its parameters do; the trait's set is there. A prefetch may name any
        // address.
        unsafe {
            let at = self.parameters.add(self.places(step)[0]);
            if self.ahead > 0 {
                V::prefetch(at.wrapping_add(self.ahead));
            }
            let scale = self.parameter(at);
            let offset = match self.symmetric {
                true => V::mul(scale, V::broadcast(&self.half_range)),
                false => self.parameter(at.add(2 * BLOCK_ROWS)),
            };
            (scale, offset)
        }
    }

    #[inline(always)]
    unsafe fn parameter(&self, at: *const u8) -> V::Float {
        // SAFETY: as the caller's.
        unsafe {
            match self.bf16 {
                true => V::load_bf16(at),
                false => V::load_f16(at),
            }
        }
    }

    /// Where a unit of `BITS` bits of a step starts, the memory ahead of its registers being asked for.
    ///
    /// # Safety
    /// The unit is one of the step's, and the processor runs the set of `V`.
    #[inline(always)]
    unsafe fn unit<const BITS: usize>(&self, step: usize, unit: usize) -> *const u8 {
        // SAFETY: the caller's unit exists; a prefetch may name any address.
        unsafe {
            let at = self.codes(step).add(unit * BITS * REGISTER_BYTES);
            if self.ahead > 0 {
                for i in 0..BITS {
                    V::prefetch(at.wrapping_add(self.ahead + i * REGISTER_BYTES));
                }
            }
            at
        }
    }
}

/// Four codes a lane, a byte each, of a unit whose registers start at `unit`.
///
/// # Safety
/// The unit exists, and the processor runs the set of `V`.
#[inline(always)]
unsafe fn quad<V: Lanes, const BITS: usize>(unit: *const u8, quad: usize) -> V::Int {
    let (word, shift) = bits::place(BITS, quad);
    // SAFETY: the caller's; a unit has as many registers as a code has bits.
    unsafe {
        let register = |word: usize| V::load(unit.add(word * REGISTER_BYTES));
        match (BITS, quad) {
            (3, 6 | 7) => {
                // The bits above the two low ones, then those below the high one, are masked away.
                let high = V::shift(register(2), quad as u32 - 2);
                V::mask(
                    V::blend(V::shift(register(word), 6), high, 0x0303_0303),
                    0x0707_0707,
                )
            }
            (8, _) => register(word),
            _ if shift == 0 => V::mask(register(word), 0x0101_0101 * ((1 << BITS) - 1)),
            _ => V::mask(V::shift(register(word), shift), 0x0101_0101 * ((1 << BITS) - 1)),
        }
    }
}

/// Expands the codes of a block: for each four columns, 16 rows x 4 bytes.
///
/// # Safety
/// As [`multiply`]; `to` is valid for writes of `steps.units` x 512 bytes.
#[inline(always)]
unsafe fn expand_bits<V: Lanes, const BITS: usize>(weights: &Weights, steps: &Steps, to: *mut u8) {
    // SAFETY: the caller's; steps and units are those of the layout.
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
/// The processor runs the set of `V`, and block and steps belong to `weights.layout`.
#[inline(always)]
pub(super) unsafe fn expand<V: Lanes>(weights: &Weights, steps: &Steps, to: &mut [u8]) {
    assert!(to.len() == steps.units * UNIT * BLOCK_ROWS);
    let to = to.as_mut_ptr();
    // SAFETY: `to` has room by the assertion, the rest is the caller's.
    unsafe {
        match weights.layout.bits() {
            2 => expand_bits::<V, 2>(weights, steps, to),
            3 => expand_bits::<V, 3>(weights, steps, to),
            4 => expand_bits::<V, 4>(weights, steps, to),
            _ => expand_bits::<V, 8>(weights, steps, to),
        }
    }
}

/// Units that start in a step: half of the steps of 16 columns have none.
#[inline(always)]
fn units_of(steps: &Steps, step: usize) -> std::ops::Range<usize> {
    let first = |step: usize| (step * steps.columns).div_ceil(UNIT);
    first(step)..first(step + 1).min(steps.units)
}

/// Units that a step reads: two steps of 16 columns share one.
#[inline(always)]
fn units_in(steps: &Steps, step: usize) -> std::ops::Range<usize> {
    let first = step * steps.columns / UNIT;
    first..(first + (steps.columns / UNIT).max(1)).min(steps.units)
}

/// The sums of a step for R blocks and M lines, each in C chains.
type Sums<V, const R: usize, const M: usize, const C: usize> = [[[<V as Lanes>::Int; C]; M]; R];

/// The chains that are in use, of C.
#[inline(always)]
const fn chains<V: Lanes, const C: usize>() -> usize {
    if V::CHAINS { C } else { 1 }
}

/// Adds the dot products of quad `QUAD` of a unit of each block.
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
    // SAFETY: a unit has QUADS * M words.
    unsafe {
        let mut codes = [V::int_zero(); R];
        for r in 0..R {
            codes[r] = quad::<V, BITS>(units[r], QUAD);
        }
        for line in 0..M {
            for r in 0..R {
                let sum = &mut sums[r][line][QUAD % chains::<V, C>()];
                *sum = V::dot::<BITS>(*sum, codes[r], words.add(QUAD * M + line));
            }
        }
    }
}

/// The integer sum of a token's planes as a float: what their chains hold, each plane worth 256 of the next.
///
/// # Safety
/// As [`multiply`]; `sums` has at least one plane.
#[inline(always)]
unsafe fn combine<V: Lanes, const C: usize>(sums: &[[V::Int; C]]) -> V::Float {
    // SAFETY: the caller has the trait's set.
    unsafe {
        let digit = |chains: &[V::Int; C]| {
            let mut sum = chains[0];
            for chain in 1..C {
                sum = V::int_add(sum, chains[chain]);
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
    // SAFETY: the caller's; a tile has QUADS * M words a unit.
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
            ($($quad:literal)*) => {
                $(dots::<V, BITS, R, M, C, $quad>(&units, words, &mut found);)*
            };
        }
        // A step of 16 columns has half of its unit: the first if its number is even.
        let halves = [
            steps.columns >= UNIT || step % 2 == 0,
            steps.columns >= UNIT || step % 2 == 1,
        ];
        if halves[0] {
            quads!(0 1 2 3);
        }
        if halves[1] {
            quads!(4 5 6 7);
        }
        for (line, found) in sums.as_flattened_mut().iter_mut().zip(found.as_flattened()) {
            for chain in 0..chains::<V, C>() {
                line[chain] = V::end::<BITS>(line[chain], found[chain]);
            }
        }
    }
}

/// Multiplies R blocks by a tile of N tokens of M / N planes each; each of `out` gets N x 16 outputs.
///
/// # Safety
/// The processor runs the set of `V`. The blocks, the steps and the tile belong to `weights.layout`, `BITS` is its, and
/// the tile holds N tokens in M lines.
#[inline(always)]
unsafe fn multiply<
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
    // SAFETY: units and steps stay below those of the layout, to which blocks and tile belong: a tile has N scales and
    // sums a step, and each of `out` 16 floats a token.
    unsafe {
        let mut cursors = [Cursor::<V>::new(&weights[0]); R];
        if R > 1 {
            // The next blocks: with few tokens an expert the processor's own prefetching is too late. A layer of 128
            // experts with 16 tokens each took about a seventh less with it (one thread of Zen 4).
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
            let mut scales = [(V::zero(), V::zero()); R];
            for r in 0..R {
                scales[r] = cursors[r].scales(step);
            }
            for token in 0..N {
                for r in 0..R {
                    let sum = combine::<V, C>(&sums[r][token * (M / N)..(token + 1) * (M / N)]);
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

/// A token's total with a step's integer sum; `at` is the place of the step's scale and sum in the tile.
///
/// # Safety
/// The processor runs the set of `V`, and the tile has the place.
#[inline(always)]
pub(super) unsafe fn add_step<V: Lanes>(
    total: V::Float,
    sum: V::Float,
    (scale, offset): (V::Float, V::Float),
    tile: &Tile,
    at: usize,
) -> V::Float {
    // SAFETY: the caller's.
    unsafe {
        let dot = V::mul(sum, V::broadcast(tile.scales.as_ptr().add(at)));
        let total = V::add_product(total, dot, scale);
        V::add_product(total, offset, V::broadcast(tile.sums.as_ptr().add(at)))
    }
}

/// The kernel of the layout's bits and the tile's tokens and lines, of those that are listed with the chains of a sum.
macro_rules! choose {
    ($lanes:ty, $blocks:literal, $weights:expr, $steps:expr, $tile:expr, $out:expr, $tiles:tt) => {
        choose!(@ $lanes, $blocks, $weights, $steps, $tile, $out, 2 $tiles, 3 $tiles, 4 $tiles, 8 $tiles)
    };
    (@ $lanes:ty, $blocks:literal, $weights:expr, $steps:expr, $tile:expr, $out:expr,
        $($bits:literal [$(($tokens:literal $lines:literal $chains:literal))*]),*) => {
        match ($weights[0].layout.bits(), $tile.tokens, $tile.lines()) {
            // SAFETY: the caller's; the parameters are those of layout and tile.
            $($(($bits, $tokens, $lines) => unsafe {
                multiply::<$lanes, $bits, $blocks, $tokens, $lines, $chains>($weights, $steps, $tile, $out)
            },)*)*
            other => unreachable!("no layout and tile have (bits, tokens, lines) {other:?}"),
        }
    };
}

/// Computes a block by a tile.
///
/// # Safety
/// The processor runs the set of `V`, and block, steps and tile belong to `weights.layout`.
#[inline(always)]
pub(super) unsafe fn compute<V: Lanes>(
    weights: &[Weights; 1],
    steps: &Steps,
    tile: &Tile,
    out: &mut [Out; 1],
) {
    choose!(V, 1, weights, steps, tile, out,
        [(1 1 4) (2 2 2) (3 3 1) (4 4 1) (5 5 1) (6 6 1) (7 7 1) (8 8 1) (1 3 1) (2 6 1) (3 9 1) (4 12 1)]);
}

/// As many lines go by two blocks at a time for the sake of their loads.
const PAIR_LINES: usize = 4;

/// Whether tiles of so many lines go by two blocks at a time: many for the sake of their loads, few because they wait for
/// memory. Two ascending streams come faster than one, for each stops at the end of a page (rows of 2 bits: 1.50 ms for
/// 18 MB, one after the other 1.72; one thread of a Xeon).
pub(super) fn by_pairs(lines: usize) -> bool {
    lines >= PAIR_LINES || !simd::reads_ahead()
}

/// Computes two blocks by a tile of lines that go [`by_pairs`].
///
/// # Safety
/// As [`compute`].
#[inline(always)]
pub(super) unsafe fn compute_pair<V: Lanes>(
    weights: &[Weights; 2],
    steps: &Steps,
    tile: &Tile,
    out: &mut [Out; 2],
) {
    choose!(V, 2, weights, steps, tile, out,
        [(1 1 4) (2 2 2) (3 3 1) (4 4 1) (5 5 1) (6 6 1) (7 7 1) (8 8 1) (1 3 1) (2 6 1) (3 9 1) (4 12 1)]);
}
