//! Prepared activations: multiplied by the column scales, if there are any, padded to whole quads, and quantized.

use super::PIECE;
use crate::formats::coded::{Columns, QUAD};
use crate::gemm::groupwise::{Precision, STEP_COLUMNS, digit, quantize};
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// The columns of a piece.
const COLUMNS: usize = PIECE * QUAD;
/// The maximum number of planes.
const PLANES: usize = 3;

/// The scale of a piece, that of the last plane, and the sum of each plane.
#[derive(Debug, Clone, Copy)]
struct Unit {
    scale: f32,
    sums: [i32; PLANES],
}

/// A prepared token.
pub struct Token {
    /// The planes, the most significant first, each of `padded` bytes.
    bytes: Vec<i8>,
    padded: usize,
    /// For each piece of columns.
    units: Vec<Unit>,
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
        let mut bytes = vec![0; precision.planes() * padded];
        let mut planes = bytes.chunks_exact_mut(padded.max(1));
        let mut planes: [&mut [i8]; PLANES] = std::array::from_fn(|_| planes.next().unwrap_or_default());
        let pieces = values.chunks(COLUMNS).enumerate();
        let units = pieces.map(|(piece, values)| {
            let columns = piece * COLUMNS..piece * COLUMNS + values.len();
            let planes = planes.each_mut().map(|plane| match plane.is_empty() {
                true => &mut [],
                false => &mut plane[columns.clone()],
            });
            fill(isa, values, precision, planes)
        });
        Token {
            units: units.collect(),
            bytes,
            padded,
        }
    }

    /// The value of a column's quantized activation.
    #[inline]
    pub(super) fn value(&self, column: usize) -> f32 {
        let planes = self.bytes.chunks_exact(self.padded);
        let code = planes.fold(0, |code, plane| 256 * code + i32::from(plane[column]));
        self.units[column / COLUMNS].scale * code as f32
    }

    /// The bytes of the piece that starts at a given register, of a token with `P` planes.
    #[inline]
    pub(super) fn piece<const P: usize>(&self, first: usize) -> Bytes<'_, P> {
        let unit = self.units[first / PIECE];
        Bytes {
            planes: std::array::from_fn(|plane| {
                &self.bytes[plane * self.padded + QUAD * first..(plane + 1) * self.padded]
            }),
            scale: unit.scale,
            sums: std::array::from_fn(|plane| unit.sums[plane]),
        }
    }
}

/// The quantized activations of a token for a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes<'a, const P: usize> {
    /// One plane, or three, each worth 256 of the next; four bytes per register.
    pub planes: [&'a [i8]; P],
    /// The scale of the last plane.
    pub scale: f32,
    /// The sum of each plane.
    pub sums: [i32; P],
}

vectorized! {
    /// Quantizes a piece into planes. Planes that the precision does not use are empty.
    fn fill(values: &[f32], precision: Precision, planes: [&mut [i8]; PLANES]) -> Unit = fill_portable;
}

#[inline(always)]
fn fill_portable(values: &[f32], precision: Precision, planes: [&mut [i8]; PLANES]) -> Unit {
    let mut codes = [0; STEP_COLUMNS];
    let (scale, _) = quantize(values, precision, &mut codes);
    let mut sums = [0; PLANES];
    for ((number, plane), sum) in planes.into_iter().enumerate().zip(&mut sums) {
        let shift = 8 * (precision.planes() - 1).saturating_sub(number);
        for (byte, &code) in plane.iter_mut().zip(&codes) {
            *byte = digit(code, shift) as i8;
            *sum += i32::from(*byte);
        }
    }
    Unit { scale, sums }
}
