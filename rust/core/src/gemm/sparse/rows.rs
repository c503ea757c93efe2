//! Products with half records; the width is dispatched once per row.
//!
//! Values are converted to single precision 16 at a time, in arrays that compilers keep in registers. Meanwhile an
//! upcoming record is prefetched, group by group, because processors cannot predict the next record (int8, a fifth of
//! the records in order: 3.9 GB/s without, 7.0 with prefetching, one thread of a Zen 3).

use super::nibbles;
use super::term::{LANES, Term, group};
use super::token::Token;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::formats::channels::{GROUP, Half, Width};
use crate::gemm::dense;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::simd::{self, Isa, vectorized};
use crate::types::from_bf16;

/// The maximum number of records multiplied together, first their gate rows, then their down columns: a group of a
/// token's activations, or of its sums, is read once for all, and records side by side are faster from memory than
/// sequential ones.
pub const RUN: usize = 8;

/// The products of half records with a token of their width; prefetches the values needed next.
pub fn dot(isa: Isa, width: Width, terms: &[Term<'_>], x: &Token, out: &mut [f32]) {
    match x {
        Token::Quantized(x) => nibbles::dot(isa, terms, x, out),
        Token::Floats(x) => match isa.kind() {
            // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 | Kind::Amx => unsafe { avx512::dot(width, terms, x, out) },
            _ => dot_floats(isa, width, terms, x, out),
        },
    }
}

/// Prefetches the first line of a record and its scales. Calling it for several records in a row overlaps their page
/// walks (int4, a fifth of the records in order: 0.06 us of a record's 0.56, one thread of a Xeon).
pub fn announce([gate, down]: [Half<'_>; 2]) {
    simd::fetch(&gate.values[..gate.values.len().min(1)]);
    simd::fetch(gate.scales.as_flattened());
    simd::fetch(down.scales.as_flattened());
}

vectorized! {
    fn dot_floats(width: Width, terms: &[Term<'_>], x: &[f32], out: &mut [f32]) = dot_loop;
}

/// Adds at most [`RUN`] terms in order to `y`, whose length is a multiple of a group; prefetches the values needed
/// next.
pub fn add(isa: Isa, width: Width, terms: &[Term<'_>], y: &mut [f32]) {
    match (width, isa.kind()) {
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include.
        #[cfg(target_arch = "x86_64")]
        (_, Kind::Avx512 | Kind::Amx) => unsafe { avx512::add(width, terms, y) },
        // SAFETY: `isa` proves that the processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        (Width::Int4, Kind::Avx2) => unsafe { avx2::add(terms, y) },
        _ => add_values(isa, width, terms, y),
    }
}

vectorized! {
    fn add_values(width: Width, terms: &[Term<'_>], y: &mut [f32]) = add_loop;
}

#[inline(always)]
fn dot_loop(width: Width, terms: &[Term<'_>], x: &[f32], out: &mut [f32]) {
    for (term, out) in terms.iter().zip(out) {
        *out = match width {
            Width::Int4 => unreachable!("4-bit records use integer products"),
            Width::Int8 => dot_groups(term.half, term.next, x, bytes),
            Width::Bf16 => dot_groups(term.half, term.next, x, shorts),
        };
    }
}

#[inline(always)]
fn add_loop(width: Width, terms: &[Term<'_>], y: &mut [f32]) {
    for term in terms {
        match width {
            Width::Int4 => add_groups(term, y, four_bits),
            Width::Int8 => add_groups(term, y, bytes),
            Width::Bf16 => add_groups(term, y, shorts),
        }
    }
}

/// `run` returns 16 values of a group, by the index of the run.
#[inline(always)]
fn dot_groups<const N: usize>(
    half: Half<'_>,
    next: Half<'_>,
    x: &[f32],
    run: impl Fn(&[u8; N], usize) -> [f32; LANES],
) -> f32 {
    let mut lanes = [0.0; LANES];
    for (at, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
        let (group, scale) = group::<N>(half, next, at);
        let mut sums = [0.0; LANES];
        for (number, x) in x.as_chunks::<LANES>().0.iter().enumerate() {
            let values = run(group, number);
            for lane in 0..LANES {
                sums[lane] += values[lane] * x[lane];
            }
        }
        for lane in 0..LANES {
            lanes[lane] += scale * sums[lane];
        }
    }
    fold(lanes)
}

/// The sum of all lanes. If it were inlined, its shuffles would reach into the previous loop and make that five times
/// slower.
#[inline(never)]
fn fold(lanes: [f32; LANES]) -> f32 {
    dense::fold(lanes)
}

#[inline(always)]
fn add_groups<const N: usize>(term: &Term<'_>, y: &mut [f32], run: impl Fn(&[u8; N], usize) -> [f32; LANES]) {
    for (at, y) in y.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let (group, scale) = group::<N>(term.half, term.next, at);
        let factor = term.factor * scale;
        for (number, y) in y.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let values = run(group, number);
            for lane in 0..LANES {
                y[lane] += factor * values[lane];
            }
        }
    }
}

#[inline(always)]
fn four_bits(group: &[u8; GROUP / 2], number: usize) -> [f32; LANES] {
    let (bytes, shift) = (&group[number % 2 * LANES..][..LANES], number / 2 * 4);
    // In bytes as long as possible: a register holds four times as many of them as of words.
    let codes: [i8; LANES] = std::array::from_fn(|lane| (bytes[lane] >> shift & 15) as i8 - 8);
    codes.map(f32::from)
}

#[inline(always)]
fn bytes(group: &[u8; GROUP], number: usize) -> [f32; LANES] {
    group.as_chunks::<LANES>().0[number].map(|byte| f32::from(byte as i8))
}

#[inline(always)]
fn shorts(group: &[u8; 2 * GROUP], number: usize) -> [f32; LANES] {
    let mut values = [0.0; LANES];
    for (value, bits) in values
        .iter_mut()
        .zip(group.as_chunks::<2>().0[number * LANES..].iter())
    {
        *value = from_bf16(u16::from_le_bytes(*bits));
    }
    values
}
