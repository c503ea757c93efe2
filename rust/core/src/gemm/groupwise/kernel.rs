//! The two kernels: a block of 16 rows by a tile of N tokens, over any [`Lanes`].
//!
//! One register of codes serves all N tokens: extracting its operands is paid once, and a token costs a dot product
//! (int8: four weights a lane) or a fused multiplication and addition (exact: one weight a lane).
//!
//! Counts for 32 columns of 16 rows on AVX-512, beside the loads: 4 bits 4 shifts and 8 masks, 3 bits 17, 2 bits 6
//! and 8, 8 bits none. In exact mode a shift and a table look-up a column.
//!
//! A sum is a chain of dependent operations of four or five cycles each. So one or two tokens add up in several
//! chains: integer addition is associative, and in exact mode the four bytes of a word always have a chain each.

use super::lanes::Lanes;
use super::tile::{ExactTile, Int8Tile, Steps, Tile};
use crate::bits::{self, UNIT};
use crate::groupwise::{BLOCK_ROWS, Block, Layout, ParameterType, REGISTER_BYTES};

/// Quads (four columns of each row) of a unit.
const QUADS: usize = UNIT / 4;
/// How far ahead of the codes in use memory is asked for. Measured best between 1 and 2 KB.
const AHEAD: usize = 1536;

/// Where a kernel reads weights.
pub(super) struct Weights<'a> {
    /// The parameters and codes of the rows, as long as `layout` says.
    pub block: Block<'a>,
    pub layout: Layout,
}

/// Places of one half (or the whole) of a block while a kernel walks through it.
struct Cursor<V: Lanes> {
    codes: *const u8,
    parameters: *const u8,
    stride: usize,
    symmetric: bool,
    half_range: f32,
    bf16: bool,
    lanes: std::marker::PhantomData<V>,
}

impl<V: Lanes> Cursor<V> {
    #[inline(always)]
    unsafe fn new(weights: &Weights, first_lane: usize) -> Self {
        let spec = weights.layout.spec();
        let kinds = 2 - usize::from(spec.symmetric);
        Cursor {
            // SAFETY: both sections are whole registers of 16 lanes.
            codes: unsafe { weights.block.codes.as_ptr().add(4 * first_lane) },
            // SAFETY: as above; a parameter has 2 bytes.
            parameters: unsafe { weights.block.parameters.as_ptr().add(2 * first_lane) },
            stride: if spec.group == 0 {
                0
            } else {
                2 * BLOCK_ROWS * kinds
            },
            symmetric: spec.symmetric,
            half_range: -((1u32 << (spec.bits - 1)) as f32),
            bf16: spec.parameters == ParameterType::Bf16,
            lanes: std::marker::PhantomData,
        }
    }

    /// Scales and offsets of a step.
    #[inline(always)]
    unsafe fn scales(&self, step: usize) -> (V::Float, V::Float) {
        // SAFETY: the caller's step exists, so its parameters do; the trait's set is there.
        unsafe {
            let at = self.parameters.add(step * self.stride);
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

    /// The registers of unit `unit`, the memory ahead of them being asked for.
    #[inline(always)]
    unsafe fn registers<const BITS: usize>(&self, unit: usize) -> [V::Int; BITS] {
        // SAFETY: the caller's unit exists; a prefetch may name any address.
        unsafe {
            let at = self.codes.add(unit * BITS * REGISTER_BYTES);
            let mut registers = [V::int_zero(); BITS];
            for (i, register) in registers.iter_mut().enumerate() {
                V::prefetch(at.wrapping_add(AHEAD + i * REGISTER_BYTES));
                *register = V::load(at.add(i * REGISTER_BYTES));
            }
            registers
        }
    }
}

/// Four codes a lane, a byte each.
#[inline(always)]
unsafe fn quad<V: Lanes, const BITS: usize>(registers: &[V::Int; BITS], quad: usize) -> V::Int {
    let (word, shift) = bits::place(BITS, quad);
    // SAFETY: the caller has the trait's set.
    unsafe {
        match (BITS, quad) {
            (3, 6 | 7) => {
                // The bits above the two low ones, then those below the high one, are masked away.
                let high = V::shift(registers[2], quad as u32 - 2);
                V::mask(
                    V::blend(V::shift(registers[word], 6), high, 0x0303_0303),
                    0x0707_0707,
                )
            }
            (8, _) => registers[word],
            _ if shift == 0 => V::mask(registers[word], 0x0101_0101 * ((1 << BITS) - 1)),
            _ => V::mask(V::shift(registers[word], shift), 0x0101_0101 * ((1 << BITS) - 1)),
        }
    }
}

/// Units of a step that is whole units.
#[inline(always)]
fn units_of(steps: &Steps, step: usize) -> std::ops::Range<usize> {
    let units = steps.columns / UNIT;
    step * units..((step + 1) * units).min(steps.units)
}

/// Adds the dot products of quads `FIRST..LAST` of a unit.
///
/// # Safety
/// As [`int8`]; `words` are the tile's of this unit.
#[inline(always)]
unsafe fn dots<V: Lanes, const BITS: usize, const N: usize, const FIRST: usize, const LAST: usize>(
    registers: &[V::Int; BITS],
    words: *const i32,
    sums: &mut [[V::Int; 4]; N],
) {
    let chains = (4 / N).max(1);
    for number in FIRST..LAST {
        // SAFETY: a unit has QUADS * N words.
        unsafe {
            let codes = quad::<V, BITS>(registers, number);
            for (token, sums) in sums.iter_mut().enumerate() {
                let sum = &mut sums[number % chains];
                *sum = V::dot::<BITS>(*sum, codes, words.add(number * N + token));
            }
        }
    }
}

/// Integer dot products; `out` gets N x 16 outputs.
///
/// # Safety
/// The processor runs the set of `V`. The block, the steps and the tile belong to `weights.layout`, `BITS` is its, and
/// the tile holds N tokens.
#[inline(always)]
unsafe fn int8<V: Lanes, const BITS: usize, const N: usize>(
    weights: &Weights,
    steps: &Steps,
    tile: &Int8Tile,
    out: &mut [[f32; BLOCK_ROWS]],
) {
    debug_assert_eq!((weights.layout.bits(), tile.tokens, out.len()), (BITS, N, N));
    for first_lane in (0..BLOCK_ROWS).step_by(V::LANES) {
        // SAFETY: units and steps stay below those of the layout, to which block and tile belong: a tile has QUADS * N
        // words a unit and N scales and sums a step, and `out` 16 floats a token.
        unsafe {
            let cursor = Cursor::<V>::new(weights, first_lane);
            let mut totals = [V::zero(); N];
            for step in 0..steps.count {
                let mut sums = [[V::int_zero(); 4]; N];
                if steps.columns < UNIT {
                    let words = tile.words.as_ptr().cast::<i32>().add(step / 2 * QUADS * N);
                    let registers = cursor.registers::<BITS>(step / 2);
                    match step % 2 {
                        0 => dots::<V, BITS, N, 0, 4>(&registers, words, &mut sums),
                        _ => dots::<V, BITS, N, 4, QUADS>(&registers, words, &mut sums),
                    }
                } else {
                    for unit in units_of(steps, step) {
                        let words = tile.words.as_ptr().cast::<i32>().add(unit * QUADS * N);
                        let registers = cursor.registers::<BITS>(unit);
                        dots::<V, BITS, N, 0, QUADS>(&registers, words, &mut sums);
                    }
                }
                let (scale, offset) = cursor.scales(step);
                for token in 0..N {
                    let [a, b, c, d] = sums[token];
                    let sum = V::int_add(V::int_add(a, b), V::int_add(c, d));
                    let at = step * N + token;
                    let dot = V::mul(V::to_float(sum), V::broadcast(tile.scales.as_ptr().add(at)));
                    let total = V::add_product(totals[token], dot, scale);
                    totals[token] = V::add_product(total, offset, V::broadcast(tile.sums.as_ptr().add(at)));
                }
            }
            for token in 0..N {
                V::store(totals[token], out[token].as_mut_ptr().add(first_lane));
            }
        }
    }
}

/// Adds the products of quads `FIRST..LAST` of a unit, those of byte i of a quad to sum i.
///
/// # Safety
/// As [`exact`]; `values` are the tile's of this unit.
#[inline(always)]
unsafe fn products<V: Lanes, const BITS: usize, const N: usize, const FIRST: usize, const LAST: usize>(
    registers: &[V::Int; BITS],
    values: *const f32,
    sums: &mut [[V::Float; 4]; N],
) {
    for number in FIRST..LAST {
        // SAFETY: a unit has 32 * N values.
        unsafe {
            let (codes, shift) = match BITS == 3 && number >= 6 {
                true => (quad::<V, BITS>(registers, number), 0),
                false => {
                    let (word, shift) = bits::place(BITS, number);
                    (registers[word], shift)
                }
            };
            for byte in 0..4 {
                let codes = V::expand::<BITS>(codes, shift + 8 * byte as u32);
                for (token, sums) in sums.iter_mut().enumerate() {
                    let x = V::broadcast(values.add((4 * number + byte) * N + token));
                    sums[byte] = V::add_weighted(sums[byte], codes, x);
                }
            }
        }
    }
}

/// Products in single precision; `out` gets N x 16 outputs.
///
/// # Safety
/// As [`int8`].
#[inline(always)]
unsafe fn exact<V: Lanes, const BITS: usize, const N: usize>(
    weights: &Weights,
    steps: &Steps,
    tile: &ExactTile,
    out: &mut [[f32; BLOCK_ROWS]],
) {
    debug_assert_eq!((weights.layout.bits(), tile.tokens, out.len()), (BITS, N, N));
    for first_lane in (0..BLOCK_ROWS).step_by(V::LANES) {
        // SAFETY: as in `int8`; a tile has 32 * N values a unit and N sums a step.
        unsafe {
            let cursor = Cursor::<V>::new(weights, first_lane);
            let mut totals = [V::zero(); N];
            for step in 0..steps.count {
                let mut sums = [[V::zero(); 4]; N];
                if steps.columns < UNIT {
                    let values = tile.values.as_ptr().cast::<f32>().add(step / 2 * UNIT * N);
                    let registers = cursor.registers::<BITS>(step / 2);
                    match step % 2 {
                        0 => products::<V, BITS, N, 0, 4>(&registers, values, &mut sums),
                        _ => products::<V, BITS, N, 4, QUADS>(&registers, values, &mut sums),
                    }
                } else {
                    for unit in units_of(steps, step) {
                        let values = tile.values.as_ptr().cast::<f32>().add(unit * UNIT * N);
                        let registers = cursor.registers::<BITS>(unit);
                        products::<V, BITS, N, 0, QUADS>(&registers, values, &mut sums);
                    }
                }
                let (scale, offset) = cursor.scales(step);
                for token in 0..N {
                    let [a, b, c, d] = sums[token];
                    let sum = V::add(V::add(a, b), V::add(c, d));
                    let x = V::broadcast(tile.sums.as_ptr().add(step * N + token));
                    totals[token] = V::add_product(V::add_product(totals[token], sum, scale), offset, x);
                }
            }
            for token in 0..N {
                V::store(totals[token], out[token].as_mut_ptr().add(first_lane));
            }
        }
    }
}

/// Computes a block by a tile: the kernel of the tile's mode, the layout's bits and the tile's tokens.
///
/// # Safety
/// The processor runs the set of `V`, and block, steps and tile belong to `weights.layout`.
#[inline(always)]
pub(super) unsafe fn compute<V: Lanes>(
    weights: &Weights,
    steps: &Steps,
    tile: &Tile,
    out: &mut [[f32; BLOCK_ROWS]; 8],
) {
    macro_rules! choose {
        ($kernel:ident, $tile:expr, $($bits:literal: $($tokens:literal)*),*) => {
            match (weights.layout.bits(), $tile.tokens) {
                // SAFETY: the caller's; the parameters are those of layout and tile.
                $($(($bits, $tokens) => unsafe {
                    $kernel::<V, $bits, $tokens>(weights, steps, $tile, &mut out[..$tokens])
                },)*)*
                (bits, tokens) => unreachable!("no tile has {tokens} tokens, no layout {bits} bits"),
            }
        };
    }
    match tile {
        Tile::Exact(tile) => choose!(exact, tile, 2: 1 2 4, 3: 1 2 4, 4: 1 2 4, 8: 1 2 4),
        Tile::Int8(tile) => choose!(int8, tile, 2: 1 2 4 8, 3: 1 2 4 8, 4: 1 2 4 8, 8: 1 2 4 8),
    }
}
