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
    /// The bits of the values, [padded columns, N].
    pub values: Vec<u32>,
    /// Sums of the activations, [steps, N].
    pub sums: Vec<f32>,
}

/// Quantized activations.
pub(super) struct Int8Tile {
    /// N.
    pub tokens: usize,
    /// Four neighbouring activations a word, [padded columns / 4, N].
    pub words: Vec<u32>,
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

/// Tokens in the form of a mode, one after the other: made once however many experts a token goes through.
pub(super) struct Rows {
    mode: Mode,
    /// 32-bit words of a token: its values (exact) or four quantized values each (int8), padded with zeros.
    width: usize,
    words: Vec<u32>,
    steps: usize,
    /// int8 only.
    scales: Vec<f32>,
    sums: Vec<f32>,
}

/// One token of [`Rows`], to be filled.
pub(super) struct Row<'a> {
    words: &'a mut [u32],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Rows {
    /// Room for `tokens` tokens.
    pub fn new(steps: &Steps, tokens: usize, mode: Mode) -> Rows {
        let width = steps.units * UNIT / if mode == Mode::Int8 { 4 } else { 1 };
        let scales = if mode == Mode::Int8 {
            tokens * steps.count
        } else {
            0
        };
        Rows {
            mode,
            width,
            words: vec![0; tokens * width],
            steps: steps.count,
            scales: vec![0.0; scales],
            sums: vec![0.0; tokens * steps.count],
        }
    }

    /// The tokens, to be filled one by one; none where there are no columns.
    pub fn rows(&mut self) -> Vec<Row<'_>> {
        let steps = self.steps.max(1);
        let mut scales = self.scales.chunks_exact_mut(steps);
        let words = self.words.chunks_exact_mut(self.width.max(1));
        let pairs = words.zip(self.sums.chunks_exact_mut(steps));
        pairs
            .map(|(words, sums)| Row {
                words,
                scales: scales.next().unwrap_or_default(),
                sums,
            })
            .collect()
    }

    /// A tile of some tokens, padded with zeros to `width` tokens.
    #[inline(always)]
    pub fn tile(&self, tokens: impl Iterator<Item = usize>, width: usize) -> Tile {
        let mut words = vec![0; self.width * width];
        let mut scales = vec![0.0; self.steps * width];
        let mut sums = vec![0.0; self.steps * width];
        for (lane, token) in tokens.enumerate() {
            spread(&self.words, self.width, token, &mut words, width, lane);
            spread(&self.sums, self.steps, token, &mut sums, width, lane);
            if self.mode == Mode::Int8 {
                spread(&self.scales, self.steps, token, &mut scales, width, lane);
            }
        }
        match self.mode {
            Mode::Exact => Tile::Exact(ExactTile {
                tokens: width,
                values: words,
                sums,
            }),
            Mode::Int8 => Tile::Int8(Int8Tile {
                tokens: width,
                words,
                scales,
                sums,
            }),
        }
    }
}

/// Copies a token's values to every `width`-th place.
#[inline(always)]
fn spread<T: Copy>(from: &[T], count: usize, token: usize, to: &mut [T], width: usize, lane: usize) {
    let from = &from[token * count..][..count];
    if width == 1 {
        to.copy_from_slice(from);
        return;
    }
    let places = to.chunks_exact_mut(width).zip(from);
    places.for_each(|(place, &value)| place[lane] = value);
}

/// Brings token `token` of `x` into the form of a mode.
#[inline(always)]
pub(super) fn fill(steps: &Steps, columns: usize, x: &Activations, token: usize, mode: Mode, row: Row) {
    let mut buffer = [0.0; STEP_COLUMNS];
    for step in 0..steps.count {
        let first = step * steps.columns;
        let last = (first + steps.columns).min(columns);
        let values = gather(x, token * columns + first..token * columns + last, &mut buffer);
        match mode {
            Mode::Exact => {
                row.sums[step] = sum(values);
                let to = row.words[first..last].iter_mut();
                to.zip(values).for_each(|(to, value)| *to = value.to_bits());
            }
            Mode::Int8 => {
                let mut codes = [0; STEP_COLUMNS];
                let (scale, sum) = quantize(values, &mut codes);
                row.scales[step] = scale;
                row.sums[step] = scale * sum as f32;
                let words = row.words[first / 4..last.div_ceil(4)].iter_mut();
                let quads = codes.as_chunks::<4>().0.iter();
                words
                    .zip(quads)
                    .for_each(|(to, four)| *to = u32::from_le_bytes(four.map(|code| code as u8)));
            }
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

/// Adding it rounds a value below 2^22 to the nearest integer, ties to even.
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
        // The integer stands in the low bits of the sum.
        let integer = (x * factor + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32;
        *code = integer as i8;
        sum += integer;
    }
    (largest / 127.0, sum)
}
