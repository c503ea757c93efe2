//! Prepared activations for the kernels: integers in one or three planes, with the scales and sums of each step.

use std::ops::Range;

use super::{Precision, STEP_COLUMNS};
use crate::bits::UNIT;
use crate::formats::groupwise::Layout;
use crate::simd::vectorized;
use crate::types::Activations;

/// The value of a plane in units of the next plane.
pub(super) const DIGIT: f32 = 256.0;
/// The bytes of a row of a matrix tile: 64 columns.
pub(super) const CHUNK: usize = 64;

/// The steps of a row: products add up within a step before they are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Steps {
    /// The columns of a step: 16 or a multiple of 32.
    pub columns: usize,
    /// The steps of a row.
    pub count: usize,
    /// The 32-column units of a row.
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

    /// The columns of a chunk, the part of a row in a matrix tile: 16, 32 or 64, within one step.
    pub fn chunk(&self) -> usize {
        self.columns.min(CHUNK)
    }

    /// The chunks of a row.
    pub fn chunks(&self) -> usize {
        (self.units * UNIT).div_ceil(self.chunk())
    }

    /// The chunks of a step.
    pub fn chunks_of(&self, step: usize) -> Range<usize> {
        let chunks = self.columns / self.chunk();
        step * chunks..((step + 1) * chunks).min(self.chunks())
    }
}

/// The layouts of tiles, by the registers that read them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Words of four neighbouring activations, [padded columns / 4, lines], for vector broadcasts.
    Words,
    /// Rows of bytes, [chunks, planes, tokens, columns of a chunk], for the rows of matrix tiles.
    Rows,
}

impl Form {
    /// The columns of a row, with padding.
    fn width(self, steps: &Steps) -> usize {
        match self {
            Form::Words => steps.units * UNIT,
            Form::Rows => steps.chunks() * steps.chunk(),
        }
    }
}

/// Some tokens, interleaved. A *line* is a plane of a token; the lines of a token are consecutive.
pub(super) struct Tile {
    pub form: Form,
    /// The number of tokens, N.
    pub tokens: usize,
    /// The planes of a token, the most significant first.
    pub planes: usize,
    /// The planes, four bytes per word.
    pub words: Vec<u32>,
    /// The scales of the last planes, [steps, N].
    pub scales: Vec<f32>,
    /// The sums of the quantized activations times their scales, [steps, N].
    pub sums: Vec<f32>,
}

impl Tile {
    /// The number of planes of all tokens.
    pub fn lines(&self) -> usize {
        self.tokens * self.planes
    }

    /// An empty tile for one token.
    pub fn single(steps: &Steps, planes: usize) -> Tile {
        Tile::zeros(steps, planes, 1, Form::Words)
    }

    fn zeros(steps: &Steps, planes: usize, tokens: usize, form: Form) -> Tile {
        Tile {
            form,
            tokens,
            planes,
            words: vec![0; form.width(steps) / 4 * planes * tokens],
            scales: vec![0.0; steps.count * tokens],
            sums: vec![0.0; steps.count * tokens],
        }
    }

    /// Whether the tile has the planes, scales and sums of `steps`.
    pub fn is_of(&self, steps: &Steps) -> bool {
        let words = self.form.width(steps) / 4 * self.lines();
        self.words.len() == words
            && [&self.scales, &self.sums]
                .iter()
                .all(|of| of.len() == steps.count * self.tokens)
    }

    /// A tile of single tokens, padded with zeros to `width` tokens.
    pub fn interleaved<'a>(
        tokens: impl Iterator<Item = &'a Tile>,
        steps: &Steps,
        planes: usize,
        width: usize,
        form: Form,
    ) -> Tile {
        let mut tile = Tile::zeros(steps, planes, width, form);
        for (lane, token) in tokens.enumerate() {
            spread::<1, _>(&token.sums, &mut tile.sums, width, lane);
            spread::<1, _>(&token.scales, &mut tile.scales, width, lane);
            match (form, planes) {
                (Form::Rows, _) => tile.lay(&token.words, steps, lane),
                (Form::Words, 1) => spread::<1, _>(&token.words, &mut tile.words, width, lane),
                (Form::Words, _) => spread::<3, _>(&token.words, &mut tile.words, 3 * width, 3 * lane),
            }
        }
        tile
    }

    /// Copies the planes of a token, chunk by chunk.
    fn lay(&mut self, from: &[u32], steps: &Steps, lane: usize) {
        let (words, planes) = (steps.chunk() / 4, self.planes);
        for (chunk, from) in from.chunks(words * planes).enumerate() {
            for plane in 0..planes {
                let at = ((chunk * planes + plane) * self.tokens + lane) * words;
                let from = from[plane..].iter().step_by(planes);
                let to = self.words[at..at + words].iter_mut();
                to.zip(from).for_each(|(to, &word)| *to = word);
            }
        }
    }
}

/// Copies a token's values, N consecutive ones at a time, with stride `width`.
#[inline(always)]
fn spread<const N: usize, T: Copy>(from: &[T], to: &mut [T], width: usize, lane: usize) {
    let places = to.chunks_exact_mut(width).zip(from.as_chunks::<N>().0);
    places.for_each(|(place, values)| place[lane..lane + N].copy_from_slice(values));
}

vectorized! {
    /// Quantizes token `token` of `x` into a tile of one token.
    pub(super) fn fill(
        steps: &Steps,
        columns: usize,
        x: &Activations,
        token: usize,
        precision: Precision,
        tile: &mut Tile,
    ) = fill_portable, in 256 bits;
}

#[inline(always)]
fn fill_portable(
    steps: &Steps,
    columns: usize,
    x: &Activations,
    token: usize,
    precision: Precision,
    tile: &mut Tile,
) {
    let (mut buffer, planes) = ([0.0; STEP_COLUMNS], precision.planes());
    for step in 0..steps.count {
        let first = step * steps.columns;
        let last = (first + steps.columns).min(columns);
        let values = gather(x, token * columns + first..token * columns + last, &mut buffer);
        let mut codes = [0; STEP_COLUMNS];
        let (scale, sum) = quantize(values, precision, &mut codes);
        tile.scales[step] = scale;
        tile.sums[step] = scale * sum as f32;
        let words = &mut tile.words[first / 4 * planes..last.div_ceil(4) * planes];
        let quads = codes.as_chunks::<4>().0.iter();
        let word = |four: &[i32; 4], shift| u32::from_le_bytes(four.map(|code| digit(code, shift)));
        match precision {
            Precision::Int8 => words
                .iter_mut()
                .zip(quads)
                .for_each(|(to, four)| *to = word(four, 0)),
            Precision::Exact => {
                let places = words.as_chunks_mut::<3>().0.iter_mut().zip(quads);
                places.for_each(|(to, four)| *to = [word(four, 16), word(four, 8), word(four, 0)]);
            }
        }
    }
}

/// The signed digit of a number whose less significant digits take `shift` bits; the number is rounded to it.
#[inline(always)]
pub(in crate::gemm) fn digit(code: i32, shift: usize) -> u8 {
    let half = [0, 0x80, 0x8080][shift / 8];
    ((code + half) >> shift) as u8
}

/// The activations of a token in a step.
#[inline(always)]
fn gather<'a>(x: &Activations, range: Range<usize>, buffer: &'a mut [f32; STEP_COLUMNS]) -> &'a [f32] {
    let buffer = &mut buffer[..range.len()];
    x.widen(range.start, buffer);
    buffer
}

/// Steps whose largest activation is below this value count as zero: the reciprocal of their scale might overflow.
const SMALLEST: f32 = 7.888_609e-31; // 2^-100

/// Quantizes at most 256 values; returns the scale and the sum of the codes, which are at most [`Precision::largest`]
/// in magnitude: the sum of 256 of them stays below 2^31.
#[inline(always)]
pub(in crate::gemm) fn quantize(
    values: &[f32],
    precision: Precision,
    codes: &mut [i32; STEP_COLUMNS],
) -> (f32, i32) {
    // As integers, the bits of magnitudes are ordered like the magnitudes, with infinity and NaN last.
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
    let factor = precision.largest() / largest;
    let mut sum = 0;
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = round(x * factor);
        sum += *code;
    }
    (largest / precision.largest(), sum)
}

/// The nearest integer, ties to even, of a number below 2^23 in magnitude. Not `round_ties_even() as i32`, whose
/// handling of numbers out of range prevents vectorization.
#[inline(always)]
fn round(x: f32) -> i32 {
    /// Adding this constant to a number below 2^22 rounds it to an integer, which is then in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let high = (x * (1.0 / 256.0) + ROUNDER) - ROUNDER;
    let low = (x - high * 256.0) + ROUNDER;
    let integer = |x: f32| x.to_bits() as i32 - ROUNDER.to_bits() as i32;
    (integer(high + ROUNDER) << 8) + integer(low)
}
