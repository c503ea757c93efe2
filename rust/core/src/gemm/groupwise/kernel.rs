//! The kernel: a block of 16 rows by a tile of N tokens, over any [`Lanes`].
//!
//! One register of codes serves all tokens: extracting its operands is paid once, and a line of activations (a token's
//! only plane, or one of its three) costs a dot product for four weights a lane.
//!
//! Counts for 32 columns of 16 rows on AVX-512, beside the loads: 4 bits 4 shifts and 8 masks, 3 bits 17, 2 bits 6
//! and 8, 8 bits none, and 8 dot products a line.
//!
//! A sum is a chain of dependent operations of four or five cycles each. So few lines add up in several chains.

use super::Out;
use super::lanes::Lanes;
use super::tile::{DIGIT, Steps, Tile};
use crate::bits::{self, UNIT};
use crate::groupwise::{BLOCK_ROWS, Block, Layout, ParameterType, REGISTER_BYTES};

/// Quads (four columns of each row) of a unit.
const QUADS: usize = UNIT / 4;
/// How far ahead of the codes in use memory is asked for, in bytes. Measured best between 1 and 2 KB.
const AHEAD: usize = 1536;

/// Where a kernel reads weights.
pub(super) struct Weights<'a> {
    /// The parameters and codes of the rows, as long as `layout` says.
    pub block: Block<'a>,
    pub layout: Layout,
}

/// Places of one half (or the whole) of a block while a kernel walks through it.
pub(super) struct Cursor<V: Lanes> {
    codes: *const u8,
    parameters: *const u8,
    /// Bytes from a step's parameters to the next one's.
    stride: usize,
    /// Bytes of the block's parameters.
    parameter_bytes: usize,
    symmetric: bool,
    half_range: f32,
    bf16: bool,
    lanes: std::marker::PhantomData<V>,
}

impl<V: Lanes> Cursor<V> {
    /// # Safety
    /// `first_lane` is 0, or 8 for lanes of half a block; the block is as long as the layout says.
    #[inline(always)]
    pub unsafe fn new(weights: &Weights, first_lane: usize) -> Self {
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
            parameter_bytes: weights.block.parameters.len(),
            symmetric: spec.symmetric,
            half_range: -((1u32 << (spec.bits - 1)) as f32),
            bf16: spec.parameters == ParameterType::Bf16,
            lanes: std::marker::PhantomData,
        }
    }

    /// Brings the parameters into the first-level cache, in the order of their bytes.
    ///
    /// They lie between the codes of the last block and those of this one. Read here, all bytes of a run of blocks are one
    /// ascending stream, which processors prefetch much further ahead than programs can ask for; read step by step, they
    /// are a second stream, and each block starts two anew.
    ///
    /// # Safety
    /// The processor runs the set of `V`, and this is the cursor of a block's first lanes.
    #[inline(always)]
    unsafe fn stream_parameters(&self) {
        for line in (0..self.parameter_bytes).step_by(REGISTER_BYTES) {
            // SAFETY: the line is one of the block's parameters; a prefetch may name any address.
            unsafe {
                V::prefetch(self.parameters.wrapping_add(line + AHEAD));
                self.parameters.add(line).read_volatile();
            }
        }
    }

    /// Scales and offsets of a step.
    ///
    /// # Safety
    /// The step exists, and the processor runs the set of `V`.
    #[inline(always)]
    pub unsafe fn scales(&self, step: usize) -> (V::Float, V::Float) {
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

/// Expands the codes of a block: for each four columns, 16 rows x 4 bytes.
///
/// # Safety
/// As [`multiply`], for 16 lanes; `to` is valid for writes of `units` x 512 bytes.
#[inline(always)]
unsafe fn expand_bits<V: Lanes, const BITS: usize>(weights: &Weights, units: usize, to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        let cursor = Cursor::<V>::new(weights, 0);
        cursor.stream_parameters();
        for unit in 0..units {
            let registers = cursor.registers::<BITS>(unit);
            for number in 0..QUADS {
                let at = to.add((unit * QUADS + number) * REGISTER_BYTES);
                V::store_int(quad::<V, BITS>(&registers, number), at);
            }
        }
    }
}

/// Expands the codes of a block: for each four columns, 16 rows x 4 bytes.
///
/// # Safety
/// The processor runs the set of `V`, which has 16 lanes, and the block has `units` units.
#[inline(always)]
pub(super) unsafe fn expand<V: Lanes>(weights: &Weights, units: usize, to: &mut [u8]) {
    assert!(V::LANES == BLOCK_ROWS && to.len() == units * UNIT * BLOCK_ROWS);
    let to = to.as_mut_ptr();
    // SAFETY: `to` has room by the assertion, the rest is the caller's.
    unsafe {
        match weights.layout.bits() {
            2 => expand_bits::<V, 2>(weights, units, to),
            3 => expand_bits::<V, 3>(weights, units, to),
            4 => expand_bits::<V, 4>(weights, units, to),
            _ => expand_bits::<V, 8>(weights, units, to),
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
/// As [`multiply`]; `words` are the tile's of this unit.
#[inline(always)]
unsafe fn dots<V: Lanes, const BITS: usize, const M: usize, const FIRST: usize, const LAST: usize>(
    registers: &[V::Int; BITS],
    words: *const i32,
    sums: &mut [[V::Int; 4]; M],
) {
    let chains = if M > 3 { 1 } else { 4 / M.next_power_of_two() };
    for number in FIRST..LAST {
        // SAFETY: a unit has QUADS * M words.
        unsafe {
            let codes = quad::<V, BITS>(registers, number);
            for (line, sums) in sums.iter_mut().enumerate() {
                let sum = &mut sums[number % chains];
                *sum = V::dot::<BITS>(*sum, codes, words.add(number * M + line));
            }
        }
    }
}

/// The integer sum of a token's planes as a float: what their chains hold, each plane worth 256 of the next.
///
/// # Safety
/// As [`multiply`]; `sums` has at least one plane.
#[inline(always)]
unsafe fn combine<V: Lanes>(sums: &[[V::Int; 4]]) -> V::Float {
    // SAFETY: the caller has the trait's set.
    unsafe {
        let digit = |[a, b, c, d]: [V::Int; 4]| V::to_float(V::int_add(V::int_add(a, b), V::int_add(c, d)));
        let mut total = digit(sums[0]);
        for &plane in &sums[1..] {
            total = V::add_product(digit(plane), total, V::broadcast(&DIGIT));
        }
        total
    }
}

/// Multiplies a block by a tile of N tokens of M / N planes each; `out` gets N x 16 outputs.
///
/// # Safety
/// The processor runs the set of `V`. The block, the steps and the tile belong to `weights.layout`, `BITS` is its, and
/// the tile holds N tokens in M lines.
#[inline(always)]
unsafe fn multiply<V: Lanes, const BITS: usize, const N: usize, const M: usize>(
    weights: &Weights,
    steps: &Steps,
    tile: &Tile,
    out: &mut [[f32; BLOCK_ROWS]],
) {
    debug_assert_eq!((weights.layout.bits(), tile.tokens, out.len()), (BITS, N, N));
    for first_lane in (0..BLOCK_ROWS).step_by(V::LANES) {
        // SAFETY: units and steps stay below those of the layout, to which block and tile belong: a tile has QUADS * M
        // words a unit and N scales and sums a step, and `out` 16 floats a token.
        unsafe {
            let cursor = Cursor::<V>::new(weights, first_lane);
            if first_lane == 0 {
                cursor.stream_parameters();
            }
            let mut totals = [V::zero(); N];
            for step in 0..steps.count {
                let mut sums = [[V::int_zero(); 4]; M];
                if steps.columns < UNIT {
                    let words = tile.words.as_ptr().cast::<i32>().add(step / 2 * QUADS * M);
                    let registers = cursor.registers::<BITS>(step / 2);
                    match step % 2 {
                        0 => dots::<V, BITS, M, 0, 4>(&registers, words, &mut sums),
                        _ => dots::<V, BITS, M, 4, QUADS>(&registers, words, &mut sums),
                    }
                } else {
                    for unit in units_of(steps, step) {
                        let words = tile.words.as_ptr().cast::<i32>().add(unit * QUADS * M);
                        let registers = cursor.registers::<BITS>(unit);
                        dots::<V, BITS, M, 0, QUADS>(&registers, words, &mut sums);
                    }
                }
                let (scale, offset) = cursor.scales(step);
                for token in 0..N {
                    let sum = combine::<V>(&sums[token * (M / N)..(token + 1) * (M / N)]);
                    totals[token] =
                        add_step::<V>(totals[token], sum, (scale, offset), tile, step * N + token);
                }
            }
            for token in 0..N {
                V::store(totals[token], out[token].as_mut_ptr().add(first_lane));
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

/// Computes a block by a tile: the kernel of the layout's bits and the tile's tokens and planes.
///
/// # Safety
/// The processor runs the set of `V`, and block, steps and tile belong to `weights.layout`.
#[inline(always)]
pub(super) unsafe fn compute<V: Lanes>(weights: &Weights, steps: &Steps, tile: &Tile, out: &mut Out) {
    macro_rules! choose {
        ($($bits:literal)*) => { choose!(@ $($bits: (1 1) (2 2) (4 4) (8 8) (1 3) (2 6) (4 12)),*) };
        (@ $($bits:literal: $(($tokens:literal $lines:literal))*),*) => {
            match (weights.layout.bits(), tile.tokens, tile.lines()) {
                // SAFETY: the caller's; the parameters are those of layout and tile.
                $($(($bits, $tokens, $lines) => unsafe {
                    multiply::<V, $bits, $tokens, $lines>(weights, steps, tile, &mut out[..$tokens])
                },)*)*
                other => unreachable!("no layout and tile have (bits, tokens, lines) {other:?}"),
            }
        };
    }
    choose!(2 3 4 8)
}
