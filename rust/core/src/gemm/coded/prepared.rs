//! Prepared activations: multiplied by the column scales, if there are any, padded to whole quads, and rounded to
//! bytes in int8.

use super::products::Bytes;
use super::{PIECE, Precision};
use crate::formats::coded::{Columns, QUAD};
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// The columns of a piece.
const COLUMNS: usize = PIECE * QUAD;
/// Pieces whose largest activation is below this value count as zero.
const TINY: f32 = 1.0 / (1u128 << 100) as f32;

/// A prepared token.
pub struct Token {
    /// The activations of exact products; empty in int8.
    pub values: Vec<f32>,
    /// The bytes; empty for exact products.
    bytes: Vec<i8>,
    /// For each piece of columns, the scale of its bytes and their sum.
    units: Vec<(f32, i32)>,
}

impl Token {
    /// Prepares token `token` of `x`, of `columns` columns with the scales `scales`.
    pub(super) fn new(
        isa: Isa,
        precision: Precision,
        x: &Activations,
        token: usize,
        columns: usize,
        scales: Option<Columns>,
    ) -> Token {
        let padded = columns.next_multiple_of(QUAD);
        let mut values = vec![0.0; padded];
        x.widen(token * columns, &mut values[..columns]);
        if let Some(scales) = scales {
            scales.multiply(&mut values);
        }
        let (mut bytes, mut units) = (Vec::new(), Vec::new());
        if precision == Precision::Int8 {
            bytes.resize(padded, 0);
            let pieces = values.chunks(COLUMNS).zip(bytes.chunks_mut(COLUMNS));
            units.extend(pieces.map(|(values, bytes)| round(isa, values, bytes)));
            values = Vec::new();
        }
        Token { values, bytes, units }
    }

    /// The activation of a column, or the value of its byte.
    #[inline]
    pub(super) fn value(&self, column: usize) -> f32 {
        match self.units.get(column / COLUMNS) {
            Some((unit, _)) => unit * f32::from(self.bytes[column]),
            None => self.values[column],
        }
    }

    /// The bytes of the piece that starts at a given register.
    #[inline]
    pub(super) fn piece(&self, first: usize) -> Bytes<'_> {
        let (unit, sum) = self.units[first / PIECE];
        Bytes {
            bytes: &self.bytes[QUAD * first..],
            unit,
            sum,
        }
    }
}

vectorized! {
    /// Rounds a piece to bytes; returns the scale and the sum of the bytes.
    fn round(values: &[f32], bytes: &mut [i8]) -> (f32, i32) = round_portable;
}

#[inline(always)]
fn round_portable(values: &[f32], bytes: &mut [i8]) -> (f32, i32) {
    // The bits of magnitudes are ordered like the magnitudes, with NaN and infinity last.
    let bits = values.iter().map(|value| value.abs().to_bits());
    let largest = f32::from_bits(bits.fold(0, u32::max));
    let unit = match largest.is_finite() {
        true if largest < TINY => 0.0,
        true => largest / 127.0,
        false => f32::NAN,
    };
    let inverse = if unit > 0.0 { 127.0 / largest } else { 0.0 };
    for (value, byte) in values.iter().zip(&mut *bytes) {
        // Values that are not finite become zero, and the scale becomes NaN.
        *byte = (value * inverse).round_ties_even() as i8;
    }
    (unit, bytes.iter().map(|&byte| i32::from(byte)).sum())
}
