//! Activations as the kernels read them: integers of one or three planes, with what each step needs.

use std::ops::Range;

use super::{Mode, STEP_COLUMNS};
use crate::bits::UNIT;
use crate::gemm::ternary::Activations;
use crate::groupwise::Layout;

/// What a plane of a number is worth, in units of the next plane.
pub(super) const DIGIT: f32 = 256.0;
/// Bytes of a row of a matrix tile: 64 columns.
pub(super) const CHUNK: usize = 64;

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

    /// Columns of a chunk, which is what matrix tiles hold of a row: 16, 32 or 64, of one step.
    pub fn chunk(&self) -> usize {
        self.columns.min(CHUNK)
    }

    /// Chunks of a row.
    pub fn chunks(&self) -> usize {
        (self.units * UNIT).div_ceil(self.chunk())
    }

    /// The chunks of a step.
    pub fn chunks_of(&self, step: usize) -> Range<usize> {
        let chunks = self.columns / self.chunk();
        step * chunks..((step + 1) * chunks).min(self.chunks())
    }
}

/// Whose registers a tile is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Words of four neighbouring activations, [padded columns / 4, lines]: a vector's broadcasts.
    Words,
    /// Rows of bytes, [chunks, planes, tokens, columns of a chunk]: a matrix tile's rows.
    Rows,
}

/// Some tokens, interleaved. A *line* is a plane of a token; those of a token follow each other.
pub(super) struct Tile {
    pub form: Form,
    /// N.
    pub tokens: usize,
    /// Planes of a token, the most significant first.
    pub planes: usize,
    /// The planes, four bytes a word.
    pub words: Vec<u32>,
    /// What the unit of the last plane is worth, [steps, N].
    pub scales: Vec<f32>,
    /// Sums of the quantized activations times their worth, [steps, N].
    pub sums: Vec<f32>,
}

impl Tile {
    /// Planes of all tokens.
    pub fn lines(&self) -> usize {
        self.tokens * self.planes
    }
}

/// Quantized tokens, one after the other: made once however many experts a token goes through.
pub(super) struct Rows {
    planes: usize,
    /// 32-bit words of a plane of a token, padded with zeros.
    width: usize,
    /// [tokens, planes, width].
    words: Vec<u32>,
    steps: Steps,
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
        let (planes, width) = (mode.planes(), steps.units * UNIT / 4);
        Rows {
            planes,
            width,
            words: vec![0; tokens * planes * width],
            steps: *steps,
            scales: vec![0.0; tokens * steps.count],
            sums: vec![0.0; tokens * steps.count],
        }
    }

    /// The tokens, to be filled one by one; none where there are no columns.
    pub fn rows(&mut self) -> Vec<Row<'_>> {
        let steps = self.steps.count.max(1);
        let words = self.words.chunks_exact_mut((self.planes * self.width).max(1));
        let scales = self.scales.chunks_exact_mut(steps);
        words
            .zip(scales)
            .zip(self.sums.chunks_exact_mut(steps))
            .map(|((words, scales), sums)| Row { words, scales, sums })
            .collect()
    }

    /// A tile of some tokens, padded with zeros to `width` tokens.
    pub fn tile(&self, tokens: impl Iterator<Item = usize> + Clone, width: usize, form: Form) -> Tile {
        let steps = self.steps.count;
        let mut tile = Tile {
            form,
            tokens: width,
            planes: self.planes,
            words: vec![0; self.tile_words(width, form)],
            scales: vec![0.0; steps * width],
            sums: vec![0.0; steps * width],
        };
        for (lane, token) in tokens.enumerate() {
            let range = token * steps..(token + 1) * steps;
            spread(&self.sums[range.clone()], &mut tile.sums, width, lane);
            spread(&self.scales[range], &mut tile.scales, width, lane);
            for plane in 0..self.planes {
                let from = &self.words[(token * self.planes + plane) * self.width..][..self.width];
                match form {
                    Form::Words => {
                        let lines = tile.lines();
                        spread(from, &mut tile.words, lines, lane * self.planes + plane);
                    }
                    Form::Rows => self.lay(from, &mut tile, plane, lane),
                }
            }
        }
        tile
    }

    fn tile_words(&self, width: usize, form: Form) -> usize {
        match form {
            Form::Words => self.width * self.planes * width,
            Form::Rows => self.steps.chunks() * self.steps.chunk() / 4 * self.planes * width,
        }
    }

    /// Copies a plane of a token, chunk by chunk.
    fn lay(&self, from: &[u32], tile: &mut Tile, plane: usize, lane: usize) {
        let words = self.steps.chunk() / 4;
        for (chunk, from) in from.chunks(words).enumerate() {
            let at = ((chunk * self.planes + plane) * tile.tokens + lane) * words;
            tile.words[at..at + from.len()].copy_from_slice(from);
        }
    }
}

/// Copies a token's values to every `width`-th place.
#[inline(always)]
fn spread<T: Copy>(from: &[T], to: &mut [T], width: usize, lane: usize) {
    if width == 1 {
        to.copy_from_slice(from);
        return;
    }
    let places = to.chunks_exact_mut(width).zip(from);
    places.for_each(|(place, &value)| place[lane] = value);
}

/// Quantizes token `token` of `x`.
#[inline(always)]
pub(super) fn fill(steps: &Steps, columns: usize, x: &Activations, token: usize, mode: Mode, row: Row) {
    let mut buffer = [0.0; STEP_COLUMNS];
    let width = row.words.len() / mode.planes();
    for step in 0..steps.count {
        let first = step * steps.columns;
        let last = (first + steps.columns).min(columns);
        let values = gather(x, token * columns + first..token * columns + last, &mut buffer);
        let mut codes = [0; STEP_COLUMNS];
        let (scale, sum) = quantize(values, mode, &mut codes);
        row.scales[step] = scale;
        row.sums[step] = scale * sum as f32;
        for plane in 0..mode.planes() {
            let shift = 8 * (mode.planes() - 1 - plane);
            let words = row.words[plane * width + first / 4..plane * width + last.div_ceil(4)].iter_mut();
            let quads = codes.as_chunks::<4>().0.iter();
            words
                .zip(quads)
                .for_each(|(to, four)| *to = u32::from_le_bytes(four.map(|code| digit(code, shift))));
        }
    }
}

/// The signed digit of a number whose less significant digits take `shift` bits; the number is rounded to it.
#[inline(always)]
fn digit(code: i32, shift: usize) -> u8 {
    let half = [0, 0x80, 0x8080][shift / 8];
    ((code + half) >> shift) as u8
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

/// A step whose largest activation is smaller counts as zero: the reciprocal of its scale might overflow.
const SMALLEST: f32 = 7.888_609e-31; // 2^-100

/// Quantizes at most 256 values; returns what a unit is worth and the sum of the codes, which are at most
/// [`Mode::largest`] in magnitude: 256 of them stay below 2^31.
#[inline(always)]
pub(super) fn quantize(values: &[f32], mode: Mode, codes: &mut [i32; STEP_COLUMNS]) -> (f32, i32) {
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
    let factor = mode.largest() / largest;
    let mut sum = 0;
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = round(x * factor);
        sum += *code;
    }
    (largest / mode.largest(), sum)
}

/// The nearest integer, ties to even, of a number below 2^23 in magnitude. Not `round_ties_even() as i32`: what that
/// does with numbers out of range keeps compilers from vector code.
#[inline(always)]
fn round(x: f32) -> i32 {
    /// Adding it to a number below 2^22 rounds it to an integer, which then stands in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let high = (x * (1.0 / 256.0) + ROUNDER) - ROUNDER;
    let low = (x - high * 256.0) + ROUNDER;
    let integer = |x: f32| x.to_bits() as i32 - ROUNDER.to_bits() as i32;
    (integer(high + ROUNDER) << 8) + integer(low)
}
