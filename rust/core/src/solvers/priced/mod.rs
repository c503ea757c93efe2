//! Rounding to integers on a uniform step, with the code lengths taken into account.
//!
//! With step d, a weight w becomes the integer q that minimizes `(w / d - q)^2 + price * bits(q)`, its squared error
//! plus the cost of its code. Code lengths depend on the spread of rows: a row block (16 rows) belongs to the *class*
//! of its root mean square, a quarter of an octave each, and a class has one list of lengths.
//! python/moepack/solvers/priced.py describes how lengths are obtained.
//!
//! Invariants: a row block's integers depend on its own weights only, neither on the number of threads nor on the
//! instruction set. All instruction sets follow the same rules of arithmetic:
//! - units: a weight in units of the step is its product in f32 by the f32 nearest to `1 / step`;
//! - class: squares are added up in f64, value i to sum i mod 16, and sums i and i + 8, i and i + 4, and so on;
//! - integer: the one whose borders ([`Envelope`]) enclose the units, on a border the lower one; beyond the largest
//!   integer with a length the nearest one, ties to even, at most 2^30 in magnitude.

pub mod count;
mod envelope;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::simd::{Isa, vectorized};
use crate::types::Activations;
use crate::{Error, Result};
use envelope::Envelope;

/// The rows of a row block.
pub(super) const BLOCK_ROWS: usize = 16;
/// The base-two logarithm of the first class's root mean square.
const NARROWEST: f64 = -24.0;
/// The number of classes per octave.
const CLASSES_AN_OCTAVE: f64 = 4.0;
/// The number of values looked up at a time: their units and cells stay in the first-level cache.
const CHUNK: usize = 256;
/// The maximum number of integers with a length.
const MAX_INTEGERS: usize = 2048;
/// The largest integer.
const MOST: f32 = (1 << 30) as f32;

/// Weights, and the costs of their integers.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// R x C.
    pub weights: Activations<'a>,
    /// The number of columns C.
    pub columns: usize,
    /// The value of an integer of one.
    pub step: f64,
    /// Weights are divided by this width to find their class.
    pub width: f64,
    /// The bits of the integers from -L to L in each class, N x (2 L + 1). The last class includes all wider rows; a
    /// single class includes all rows.
    pub lengths: &'a [f32],
    /// The number of integers with a length, 2 L + 1.
    pub integers: usize,
    /// The cost of a bit in squared steps.
    pub price: f64,
}

/// Rounds weights to R x C integers; returns their largest magnitude. If it exceeds the range of the type, `out` has
/// the low bits.
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match, a number is out of range, or a weight is NaN or infinite.
pub fn round<T: Integer>(problem: Problem, out: &mut [T], isa: Isa, pool: &ThreadPool) -> Result<i32> {
    round_by::<Envelope, T>(problem, out, isa, pool)
}

/// Rounds weights by a quantizer.
pub(super) fn round_by<Q: Quantizer, T: Integer>(
    problem: Problem,
    out: &mut [T],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<i32> {
    let rounding = Rounding::<Q>::new(problem, isa)?;
    if out.len() != problem.weights.len() {
        let (weights, places) = (problem.weights.len(), out.len());
        return invalid(format!("{weights} weights, but the output has {places} integers"));
    }
    // Threads take longer to wake than a row block to round.
    match out.len() <= rounding.block_len() {
        true => rounding.block(0, &mut Vec::new(), out),
        false => pool.install(|| rounding.all(out)),
    }
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("rounding: {what}")))
}

/// Rounds the row blocks of a class.
pub(super) trait Quantizer: Send + Sync {
    /// The quantizer for integers from -L to L with these lengths in bits, at a price in squared steps.
    fn new(bits: &[f32], price: f64) -> Self;

    /// Rounds the finite rows of a row block of `columns` columns by the inverse of the step; returns the largest
    /// magnitude.
    fn round<T: Integer>(&self, isa: Isa, values: &[f32], columns: usize, inverse: f32, out: &mut [T])
    -> i32;
}

/// An integer type that keeps the low bits of integers out of its range.
pub trait Integer: Copy + Send + Sync + Into<i32> {
    /// The integer, or its low bits.
    fn narrowed(integer: i32) -> Self;
}

impl Integer for i8 {
    fn narrowed(integer: i32) -> i8 {
        integer as i8
    }
}

impl Integer for i16 {
    fn narrowed(integer: i32) -> i16 {
        integer as i16
    }
}

impl Integer for i32 {
    fn narrowed(integer: i32) -> i32 {
        integer
    }
}

/// A checked problem, and the quantizers of the classes that occur.
struct Rounding<'a, Q> {
    problem: Problem<'a>,
    inverse: f32,
    isa: Isa,
    quantizers: Vec<OnceLock<Q>>,
}

impl<'a, Q: Quantizer> Rounding<'a, Q> {
    fn new(problem: Problem<'a>, isa: Isa) -> Result<Rounding<'a, Q>> {
        let (weights, columns) = (problem.weights.len(), problem.columns);
        if columns == 0 && weights > 0 || columns > 0 && !weights.is_multiple_of(columns) {
            return invalid(format!("{weights} weights do not form rows of {columns} columns"));
        }
        let (lengths, integers) = (problem.lengths.len(), problem.integers);
        if integers % 2 == 0 || integers > MAX_INTEGERS || lengths == 0 || !lengths.is_multiple_of(integers) {
            return invalid(format!(
                "{lengths} lengths do not form lists of {integers} integers"
            ));
        }
        let inverse = (1.0 / problem.step) as f32;
        if !(inverse.is_normal() && inverse > 0.0 && problem.width.is_normal() && problem.width > 0.0) {
            let Problem { step, width, .. } = problem;
            return invalid(format!("step {step} and width {width} must be positive"));
        }
        let quantizers = (0..lengths / integers).map(|_| OnceLock::new());
        Ok(Rounding {
            problem,
            inverse,
            isa: isa.vectors(),
            quantizers: quantizers.collect(),
        })
    }

    /// The number of weights of a row block.
    fn block_len(&self) -> usize {
        (BLOCK_ROWS * self.problem.columns).max(1)
    }

    /// Writes the integers of all weights; returns their largest magnitude.
    fn all<T: Integer>(&self, integers: &mut [T]) -> Result<i32> {
        let blocks = integers.par_chunks_mut(self.block_len()).enumerate();
        let rounded = blocks.map_init(Vec::new, |values, (block, out)| self.block(block, values, out));
        rounded.try_reduce(|| 0, |a, b| Ok(a.max(b)))
    }

    /// Writes the integers of a row block by its number; returns the largest magnitude. `values` is scratch memory.
    fn block<T: Integer>(&self, block: usize, values: &mut Vec<f32>, out: &mut [T]) -> Result<i32> {
        values.resize(out.len(), 0.0);
        self.problem.weights.widen(block * self.block_len(), values);
        self.rounded(values, out).map_or_else(
            || {
                let rows = (block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS);
                invalid(format!(
                    "NaN or infinite weights in rows {} to {}",
                    rows.0, rows.1
                ))
            },
            Ok,
        )
    }

    /// Rounds the values of a row block; returns the largest magnitude, or `None` if a value is not finite.
    fn rounded<T: Integer>(&self, values: &[f32], out: &mut [T]) -> Option<i32> {
        let squares = sum_of_squares(self.isa, values);
        if !squares.is_finite() {
            return None;
        }
        let mean_square = squares / values.len() as f64;
        let class = class(mean_square, self.problem.width, self.quantizers.len());
        let quantizer = self.quantizers[class].get_or_init(|| {
            let integers = self.problem.integers;
            Q::new(
                &self.problem.lengths[class * integers..][..integers],
                self.problem.price,
            )
        });
        Some(quantizer.round(self.isa, values, self.problem.columns, self.inverse, out))
    }
}

/// The class of a mean square, out of `classes`.
fn class(mean_square: f64, width: f64, classes: usize) -> usize {
    let octaves = 0.5 * mean_square.log2() - width.log2();
    let number = (CLASSES_AN_OCTAVE * (octaves - NARROWEST)).round_ties_even();
    // Negative numbers and minus infinity become zero.
    (number as usize).min(classes - 1)
}

impl Quantizer for Envelope {
    fn new(bits: &[f32], price: f64) -> Envelope {
        Envelope::new(bits, price)
    }

    fn round<T: Integer>(&self, isa: Isa, values: &[f32], _: usize, inverse: f32, out: &mut [T]) -> i32 {
        let (mut units, mut largest) = ([0.0; CHUNK], 0);
        for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
            let units = &mut units[..values.len()];
            let reach = scale(isa, values, inverse, units);
            let mut found = [0; CHUNK];
            let found = &mut found[..values.len()];
            self.look_up(isa, units, found);
            if reach > self.largest() as f32 {
                nearest(isa, units, self.largest() as f32, found);
            }
            largest = magnitude(isa, found).max(largest);
            out.iter_mut()
                .zip(found)
                .for_each(|(out, found)| *out = T::narrowed(*found));
        }
        largest
    }
}

vectorized! {
    /// The sum of squares by the rule of the module.
    fn sum_of_squares(values: &[f32]) -> f64 = squares_portable;
}

#[inline(always)]
fn squares_portable(values: &[f32]) -> f64 {
    let mut sums = [0.0; 16];
    let (chunks, rest) = values.as_chunks::<16>();
    let mut add = |values: &[f32]| {
        for (sum, &value) in sums.iter_mut().zip(values) {
            *sum += f64::from(value) * f64::from(value);
        }
    };
    chunks.iter().for_each(|chunk| add(chunk));
    add(rest);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

vectorized! {
    /// Writes values in units of the step; returns the largest magnitude.
    fn scale(values: &[f32], inverse: f32, units: &mut [f32]) -> f32 = scale_portable;
}

#[inline(always)]
fn scale_portable(values: &[f32], inverse: f32, units: &mut [f32]) -> f32 {
    for (value, unit) in values.iter().zip(&mut *units) {
        *unit = value * inverse;
    }
    // The bits of magnitudes are ordered like the magnitudes, and compilers find their maximum with vectors.
    let bits = units.iter().map(|unit| unit.abs().to_bits());
    f32::from_bits(bits.fold(0, u32::max))
}

vectorized! {
    /// Rounds units beyond `largest` to the nearest integer.
    fn nearest(units: &[f32], largest: f32, found: &mut [i32]) = nearest_portable;
}

#[inline(always)]
fn nearest_portable(units: &[f32], largest: f32, found: &mut [i32]) {
    for (&unit, found) in units.iter().zip(found) {
        if unit.abs() > largest {
            *found = unit.round_ties_even().clamp(-MOST, MOST) as i32;
        }
    }
}

vectorized! {
    /// The largest magnitude of integers.
    fn magnitude(found: &[i32]) -> i32 = magnitude_portable;
}

#[inline(always)]
fn magnitude_portable(found: &[i32]) -> i32 {
    found.iter().fold(0, |most, found| most.max(found.abs()))
}
