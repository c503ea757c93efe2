//! Integer products with 4-bit gate rows: four times as many weights share an instruction as with floats.
//!
//! A token's activations are quantized to 24 bits for each group, as for group-wise tensors
//! ([`crate::gemm::groupwise`]): three planes of signed bytes, each worth 256 of the next. Eight lanes add up eight
//! products each of one group, which stay below 2^30, and eight others those of the next group, so every instruction
//! set gives the same bits.

use super::rows::{Term, group};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::formats::channels::{GROUP, Half};
use crate::gemm::dense;
use crate::gemm::groupwise::{Precision, STEP_COLUMNS, digit, quantize};
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// The code bytes of a group: the first half of the columns in the low bits, the second in the high bits.
pub const BYTES: usize = GROUP / 2;
/// The lanes of a group.
pub const LANES: usize = 8;
/// The value subtracted from a stored code.
pub const MIDDLE: i32 = 8;
/// The scales of a token are padded to a multiple of this number.
pub const SCALES: usize = 16;

/// A token's activations.
pub struct Token {
    /// The activations of two groups each; zeros for a missing second group.
    pub pairs: Vec<Pair>,
    /// The scale of each group's integers, padded with zeros.
    pub scales: Vec<f32>,
}

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

impl Token {
    /// Quantizes activations of whole groups.
    #[inline(always)]
    pub fn new(values: &[f32]) -> Token {
        let groups = values.len() / GROUP;
        let zeros = Pair {
            planes: [[[0; GROUP]; 2]; 3],
            middles: [0; 2 * LANES],
        };
        let (mut pairs, mut scales) = (
            vec![zeros; groups.div_ceil(2)],
            vec![0.0; groups.next_multiple_of(SCALES)],
        );
        for (number, values) in values.as_chunks::<GROUP>().0.iter().enumerate() {
            scales[number] = pairs[number / 2].quantize(number % 2, values);
        }
        Token { pairs, scales }
    }
}

impl Pair {
    /// Quantizes the activations of a group; returns its scale.
    #[inline(always)]
    fn quantize(&mut self, number: usize, values: &[f32; GROUP]) -> f32 {
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

/// The products of half records with a token; prefetches the values needed next.
pub fn dot(isa: Isa, terms: &[Term<'_>], x: &Token, out: &mut [f32]) {
    let places = terms.iter().zip(&mut *out);
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { avx512::dot_nibbles(terms, x, out) },
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => places.for_each(|(term, out)| {
            // SAFETY: `isa` proves that the processor has AVX2.
            *out = unsafe { avx2::dot(term.half, term.next, x) }
        }),
        _ => places.for_each(|(term, out)| *out = portable(term.half, term.next, x)),
    }
}

#[inline(always)]
fn portable(half: Half<'_>, next: Half<'_>, x: &Token) -> f32 {
    let mut lanes = [0.0; 2 * LANES];
    for number in 0..half.values.len() / BYTES {
        let (codes, scale) = group::<BYTES>(half, next, number);
        let (pair, place) = (&x.pairs[number / 2], number % 2);
        let integer = |half: usize, byte: usize| {
            let digits = pair
                .planes
                .each_ref()
                .map(|plane| plane[half][place * BYTES + byte]);
            let [high, middle, low] = digits.map(|digit| i32::from(digit as i8));
            (high * 256 + middle) * 256 + low
        };
        for lane in 0..LANES {
            let products = (4 * lane..4 * lane + 4).map(|byte| {
                let code = i32::from(codes[byte]);
                (code & 15) * integer(0, byte) + (code >> 4) * integer(1, byte)
            });
            let lane = place * LANES + lane;
            lanes[lane] += scale * x.scales[number] * (products.sum::<i32>() + pair.middles[lane]) as f32;
        }
    }
    dense::fold(lanes)
}
