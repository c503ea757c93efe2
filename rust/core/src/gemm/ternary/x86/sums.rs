//! Products of lists and token blocks of 4 to 32 lanes.
//!
//! A non-zero weight takes one load of its item, one of its level, and one product per vector of tokens, with a
//! memory operand. Two sets of accumulators alternate, which hides the product latency of 4 cycles if there are few
//! vectors. The bound is one 512-bit or two 256-bit loads per cycle on Zen 4, two of either on Intel.

use std::arch::x86_64::*;

use super::vector::Vector;

/// Writes the outputs of a row for a block of `lanes` tokens; `out` takes those of its first tokens.
///
/// # Safety
/// `values` holds `lanes` floats for every position of `items`. The processor has AVX-512 F, AVX2 and FMA.
#[target_feature(enable = "avx512f,avx2,fma")]
pub(super) unsafe fn block_avx512(
    items: &[u32],
    values: &[f32],
    lanes: usize,
    levels: [f32; 2],
    out: &mut [f32],
) {
    // SAFETY: the function has the features of the vectors, which are together as wide as `lanes`; the caller guarantees
    // the values.
    unsafe {
        match lanes {
            4 => vectors::<__m128, 1, 4>(items, values, levels, out),
            8 => vectors::<__m256, 1, 8>(items, values, levels, out),
            16 => vectors::<__m512, 1, 16>(items, values, levels, out),
            32 => vectors::<__m512, 2, 32>(items, values, levels, out),
            _ => unreachable!("tiles have blocks of 4 to 32 lanes"),
        }
    }
}

/// Writes the outputs of a row for a block of `lanes` tokens; `out` takes those of its first tokens.
///
/// # Safety
/// `values` holds `lanes` floats for every position of `items`. The processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn block_avx2(
    items: &[u32],
    values: &[f32],
    lanes: usize,
    levels: [f32; 2],
    out: &mut [f32],
) {
    // SAFETY: the function has the features of the vectors, which are together as wide as `lanes`; the caller guarantees
    // the values.
    unsafe {
        match lanes {
            4 => vectors::<__m128, 1, 4>(items, values, levels, out),
            8 => vectors::<__m256, 1, 8>(items, values, levels, out),
            16 => vectors::<__m256, 2, 16>(items, values, levels, out),
            32 => vectors::<__m256, 4, 32>(items, values, levels, out),
            _ => unreachable!("tiles have blocks of 4 to 32 lanes"),
        }
    }
}

/// Writes the outputs of a row for N vectors of tokens.
///
/// # Safety
/// N vectors can be read at `values[STRIDE * position]` for every position of `items`; `V`'s features.
#[inline(always)]
unsafe fn vectors<V: Vector, const N: usize, const STRIDE: usize>(
    items: &[u32],
    values: &[f32],
    levels: [f32; 2],
    out: &mut [f32],
) {
    let mut buffer = [0.0f32; 32];
    // SAFETY: the caller guarantees features and values. The lowest bit of an item is 0 or 1, and the buffer holds the
    // lanes of a block, at most 32.
    unsafe {
        let add = |sums: &mut [V; N], item: u32| {
            let level = V::splat(*levels.as_ptr().add((item & 1) as usize));
            let from = values.as_ptr().add((item >> 1) as usize * STRIDE);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum.add_product(level, V::load(from.add(i * V::LANES)));
            }
        };
        let (mut even, mut odd) = ([V::zero(); N], [V::zero(); N]);
        let (pairs, rest) = items.as_chunks::<2>();
        for &[a, b] in pairs {
            add(&mut even, a);
            add(&mut odd, b);
        }
        rest.iter().for_each(|&item| add(&mut even, item));
        for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
            even.add(odd).store(buffer.as_mut_ptr().add(i * V::LANES));
        }
    }
    out.copy_from_slice(&buffer[..out.len()]);
}
