//! Integer products with 4-bit gate rows: four times as many weights share an instruction as with floats.
//!
//! Activations are quantized ([`super::pair`]). Eight lanes add up eight products each of one group, which stay below
//! 2^30, and eight others those of the next group, so every instruction set gives the same bits.

use super::pair::{BYTES, LANES};
use super::term::{Term, group};
use super::token::Quantized;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::formats::channels::Half;
use crate::gemm::dense;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;

/// The products of half records with a token; prefetches the values needed next.
pub fn dot(isa: Isa, terms: &[Term<'_>], x: &Quantized, out: &mut [f32]) {
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
fn portable(half: Half<'_>, next: Half<'_>, x: &Quantized) -> f32 {
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
