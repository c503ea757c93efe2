//! Activations of two groups, quantized for integer products with 4-bit rows.
//!
//! Activations are quantized to 24 bits for each group, as for group-wise tensors ([`crate::gemm::groupwise`]): three
//! planes of signed bytes, each worth 256 of the next.

use crate::formats::channels::GROUP;
use crate::gemm::groupwise::{Precision, STEP_COLUMNS, digit, quantize};

/// The code bytes of a group: the first half of the columns in the low bits, the second in the high bits.
pub const BYTES: usize = GROUP / 2;
/// The lanes of a group.
pub const LANES: usize = 8;
/// The value subtracted from a stored code.
pub const MIDDLE: i32 = 8;

/// A token's activations of two groups, arranged for 64-byte registers.
#[repr(C, align(64))]
#[derive(Clone)]
pub struct Pair {
    /// The planes, most significant first. Each has the columns whose codes are in low bits, then those in high bits;
    /// either half has [`BYTES`] of the first group, then of the second.
    pub planes: [[[u8; GROUP]; 2]; 3],
    /// The sum of each lane's integers times -[`MIDDLE`].
    pub middles: [i32; 2 * LANES],
}

impl Pair {
    /// All zeros.
    pub const ZERO: Pair = Pair {
        planes: [[[0; GROUP]; 2]; 3],
        middles: [0; 2 * LANES],
    };

    /// Quantizes the activations of a group; returns its scale.
    #[inline(always)]
    pub fn quantize(&mut self, number: usize, values: &[f32; GROUP]) -> f32 {
        let mut codes = [0; STEP_COLUMNS];
        let (scale, _) = quantize(values, Precision::Exact, &mut codes);
        let codes: &[i32; GROUP] = codes[..GROUP].try_into().expect("a step has a group");
        for (planes, shift) in self.planes.iter_mut().zip([16, 8, 0]) {
            for (half, plane) in planes.iter_mut().enumerate() {
                let to = &mut plane[number * BYTES..][..BYTES];
                for (byte, &code) in to.iter_mut().zip(&codes[half * BYTES..]) {
                    *byte = digit(code, shift);
                }
            }
        }
        for (column, code) in codes.iter().enumerate() {
            self.middles[number * LANES + column % BYTES / 4] -= MIDDLE * code;
        }
        scale
    }
}
