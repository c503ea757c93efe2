//! Sums of activations over position lists, for blocks of 4 to 64 tokens.
//!
//! A non-zero weight costs one load of its position and, for each vector of tokens, one addition straight from memory:
//! no multiplication, no type. Two sets of accumulators take turns, so that additions of latency 3 to 4 do not wait
//! for each other. Bound: one 512-bit or two 256-bit loads a cycle on Zen 4, two of either on Intel.

use std::arch::x86_64::*;

use super::super::lists::Lists;
use super::vector::Vector;

/// Writes the outputs of a row for a block of `lanes` tokens, of which `out` takes the first.
///
/// # Safety
/// The processor has AVX-512 F.
#[target_feature(enable = "avx512f,avx2,fma")]
pub(super) unsafe fn block_avx512(
    lists: &Lists,
    values: &[f32],
    lanes: usize,
    levels: (f32, f32),
    out: &mut [f32],
) {
    check(lists, values, lanes);
    // SAFETY: positions and lanes have been checked against `values`; the features are the caller's.
    unsafe {
        match lanes {
            4 => part::<__m128, 1>(lists, values, lanes, 0, levels, out),
            8 => part::<__m256, 1>(lists, values, lanes, 0, levels, out),
            16 => part::<__m512, 1>(lists, values, lanes, 0, levels, out),
            32 => part::<__m512, 2>(lists, values, lanes, 0, levels, out),
            _ => part::<__m512, 4>(lists, values, lanes, 0, levels, out),
        }
    }
}

/// Writes the outputs of a row for a block of `lanes` tokens, of which `out` takes the first.
///
/// # Safety
/// The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn block_avx2(
    lists: &Lists,
    values: &[f32],
    lanes: usize,
    levels: (f32, f32),
    out: &mut [f32],
) {
    check(lists, values, lanes);
    // SAFETY: positions and lanes have been checked against `values`; the features are the caller's.
    unsafe {
        match lanes {
            4 => part::<__m128, 1>(lists, values, lanes, 0, levels, out),
            8 => part::<__m256, 1>(lists, values, lanes, 0, levels, out),
            16 => part::<__m256, 2>(lists, values, lanes, 0, levels, out),
            32 => part::<__m256, 4>(lists, values, lanes, 0, levels, out),
            _ => {
                let (low, high) = out.split_at_mut(out.len().min(32));
                part::<__m256, 4>(lists, values, lanes, 0, levels, low);
                part::<__m256, 4>(lists, values, lanes, 32, levels, high);
            }
        }
    }
}

/// Panics unless every position that [`Lists`] can hold lies in `values`, with its `lanes` values, and `lanes` is a
/// size that tiles have.
fn check(lists: &Lists, values: &[f32], lanes: usize) {
    assert!(matches!(lanes, 4 | 8 | 16 | 32 | 64));
    assert!((lists.end() + 1) * lanes <= values.len());
}

/// The outputs of N vectors of tokens, from lane `from` on.
///
/// # Safety
/// `values` holds `lanes` floats at each position up to `lists.end()`; `from + N * V::LANES <= lanes`; `V`'s features.
#[inline(always)]
unsafe fn part<V: Vector, const N: usize>(
    lists: &Lists,
    values: &[f32],
    lanes: usize,
    from: usize,
    (negative, positive): (f32, f32),
    out: &mut [f32],
) {
    // SAFETY: as the caller promises; no position of a list exceeds `lists.end()`; the buffer holds N vectors of at
    // most 16 lanes, N at most 4.
    unsafe {
        let low = sum::<V, N>(values.as_ptr().add(from), lanes, lists.negative());
        let high = sum::<V, N>(values.as_ptr().add(from), lanes, lists.positive());
        let (negative, positive) = (V::splat(negative), V::splat(positive));
        let mut buffer = [0.0f32; 64];
        for i in 0..N {
            let y = V::product(negative, low[i]).add_product(positive, high[i]);
            y.store(buffer.as_mut_ptr().add(i * V::LANES));
        }
        out.copy_from_slice(&buffer[..out.len()]);
    }
}

/// The sum of N vectors over the positions of a list.
///
/// # Safety
/// N vectors can be read at `values + lanes * position` for every position of the list; `V`'s features.
#[inline(always)]
unsafe fn sum<V: Vector, const N: usize>(values: *const f32, lanes: usize, list: &[u32]) -> [V; N] {
    // SAFETY: as the caller promises.
    unsafe {
        let (mut even, mut odd) = ([V::zero(); N], [V::zero(); N]);
        let (pairs, rest) = list.as_chunks::<2>();
        for &[a, b] in pairs {
            let (a, b) = (values.add(a as usize * lanes), values.add(b as usize * lanes));
            for (i, (even, odd)) in even.iter_mut().zip(&mut odd).enumerate() {
                *even = even.add(V::load(a.add(i * V::LANES)));
                *odd = odd.add(V::load(b.add(i * V::LANES)));
            }
        }
        if let [a] = rest {
            let a = values.add(*a as usize * lanes);
            for (i, even) in even.iter_mut().enumerate() {
                *even = even.add(V::load(a.add(i * V::LANES)));
            }
        }
        for (even, odd) in even.iter_mut().zip(odd) {
            *even = even.add(odd);
        }
        even
    }
}
