//! Activations as the kernels read them: of N tokens, interleaved, with what each step needs.

use std::ops::Range;

use super::{Mode, STEP_COLUMNS};
use crate::bits::UNIT;
use crate::gemm::ternary::Activations;
use crate::groupwise::Layout;

/// The cuts of a row between which products add up before they are scaled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// Columns of a step: 16 or a multiple of 32.
    pub columns: usize,
    /// Steps of a row.
    pub count: usize,
    /// Units of 32 columns of a row.
    pub units: usize,
}

impl Steps {
    pub fn new(layout: &Layout) -> Steps {
        let columns = match layout.spec().group {
            0 => STEP_COLUMNS,
            group => group,
        };
        Steps {
            columns,
            count: layout.shape().columns.div_ceil(columns),
            units: layout.units(),
        }
    }
}

/// Activations in single precision.
pub(super) struct ExactTile {
    /// N.
    pub tokens: usize,
    /// [padded columns, N].
    pub values: Vec<f32>,
    /// Sums of the activations, [steps, N].
    pub sums: Vec<f32>,
}

/// Quantized activations.
pub(super) struct Int8Tile {
    /// N.
    pub tokens: usize,
    /// Four neighbouring activations a word, [padded columns / 4, N].
    pub words: Vec<i32>,
    /// What a quantized activation is worth, [steps, N].
    pub scales: Vec<f32>,
    /// Sums of the quantized activations times their worth, [steps, N].
    pub sums: Vec<f32>,
}

/// Activations in the form of a mode.
pub(super) enum Tile {
    Exact(ExactTile),
    Int8(Int8Tile),
}

impl Tile {
    /// Tokens `tokens` of `x`, padded with zeros to `width` tokens.
    #[inline(always)]
    pub fn new(
        steps: &Steps,
        columns: usize,
        x: Activations,
        tokens: Range<usize>,
        width: usize,
        mode: Mode,
    ) -> Tile {
        match mode {
            Mode::Exact => Tile::Exact(exact(steps, columns, x, tokens, width)),
            Mode::Int8 => Tile::Int8(int8(steps, columns, x, tokens, width)),
        }
    }
}

/// A step's activations of a token.
#[inline(always)]
fn gather<'a>(x: &Activations, range: Range<usize>, buffer: &'a mut [f32; STEP_COLUMNS]) -> &'a [f32] {
    let buffer = &mut buffer[..range.len()];
    match x {
        Activations::F32(x) => buffer.copy_from_slice(&x[range]),
        Activations::Bf16(x) => {
            let bits = buffer.iter_mut().zip(&x[range]);
            bits.for_each(|(value, &bits)| *value = f32::from_bits(u32::from(bits) << 16));
        }
    }
    buffer
}

#[inline(always)]
fn exact(steps: &Steps, columns: usize, x: Activations, tokens: Range<usize>, width: usize) -> ExactTile {
    let mut tile = ExactTile {
        tokens: width,
        values: vec![0.0; steps.units * UNIT * width],
        sums: vec![0.0; steps.count * width],
    };
    let mut buffer = [0.0; STEP_COLUMNS];
    for (lane, token) in tokens.enumerate() {
        for step in 0..steps.count {
            let first = step * steps.columns;
            let range = first..(first + steps.columns).min(columns);
            let values = gather(
                &x,
                token * columns + range.start..token * columns + range.end,
                &mut buffer,
            );
            tile.sums[step * width + lane] = sum(values);
            let to = tile.values[first * width + lane..].iter_mut().step_by(width);
            to.zip(values).for_each(|(to, &value)| *to = value);
        }
    }
    tile
}

/// The sum of at most 256 values: 16 chains of at most 16, then one of 16.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let (rounds, rest) = values.as_chunks::<16>();
    let mut chains = [0.0; 16];
    for round in rounds {
        chains
            .iter_mut()
            .zip(round)
            .for_each(|(chain, value)| *chain += value);
    }
    chains
        .iter_mut()
        .zip(rest)
        .for_each(|(chain, value)| *chain += value);
    chains.iter().sum()
}

#[inline(always)]
fn int8(steps: &Steps, columns: usize, x: Activations, tokens: Range<usize>, width: usize) -> Int8Tile {
    let mut tile = Int8Tile {
        tokens: width,
        words: vec![0; steps.units * (UNIT / 4) * width],
        scales: vec![0.0; steps.count * width],
        sums: vec![0.0; steps.count * width],
    };
    let mut buffer = [0.0; STEP_COLUMNS];
    for (lane, token) in tokens.enumerate() {
        for step in 0..steps.count {
            let first = step * steps.columns;
            let range = first..(first + steps.columns).min(columns);
            let values = gather(
                &x,
                token * columns + range.start..token * columns + range.end,
                &mut buffer,
            );
            let mut codes = [0; STEP_COLUMNS];
            let (scale, sum) = quantize(values, &mut codes);
            tile.scales[step * width + lane] = scale;
            tile.sums[step * width + lane] = scale * sum as f32;
            let quads = codes.as_chunks::<4>().0[..values.len().div_ceil(4)].iter();
            let to = tile.words[first / 4 * width + lane..].iter_mut().step_by(width);
            to.zip(quads).for_each(|(to, &[a, b, c, d])| {
                *to = i32::from_le_bytes([a as u8, b as u8, c as u8, d as u8])
            });
        }
    }
    tile
}

/// Adding and subtracting it rounds a value below 2^22 to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;
/// A step whose largest activation is smaller counts as zero: the reciprocal of its scale might overflow.
const SMALLEST: f32 = 7.888_609e-31; // 2^-100

/// Quantizes at most 256 values to -127..=127; returns what a code is worth and the sum of the codes.
#[inline(always)]
pub(super) fn quantize(values: &[f32], codes: &mut [i8; STEP_COLUMNS]) -> (f32, i32) {
    // As integers, magnitudes order like the numbers, infinity and NaN on top.
    let largest = values
        .iter()
        .fold(0, |most, x| most.max(x.to_bits() as i32 & i32::MAX));
    let largest = f32::from_bits(largest as u32);
    if !largest.is_finite() {
        return (f32::NAN, 0);
    }
    if largest < SMALLEST {
        return (0.0, 0);
    }
    let factor = 127.0 / largest;
    let mut sum = 0;
    for (code, &x) in codes.iter_mut().zip(values) {
        let rounded = (x * factor + ROUNDER) - ROUNDER;
        let integer = rounded as i32;
        *code = integer as i8;
        sum += integer;
    }
    (largest / 127.0, sum)
}
