//! bf16 products with NEON, expanded to f32.

use std::arch::aarch64::*;

use super::backend::{Product, Start};
use super::{LANES, Line};

/// The vectors of 16 rows.
const PARTS: usize = LANES / 4;

/// Computes a product, which has been checked.
#[target_feature(enable = "neon")]
pub(super) fn multiply(product: &mut Product) {
    let mut token = 0;
    while token < product.count {
        token += match product.count - token {
            4.. => floats::<4>(product, token),
            2.. => floats::<2>(product, token),
            _ => floats::<1>(product, token),
        };
    }
}

/// Multiplies `N` tokens from `first` on, which must exist, with all blocks; returns `N`.
#[target_feature(enable = "neon")]
fn floats<const N: usize>(product: &mut Product, first: usize) -> usize {
    for block in 0..product.blocks {
        let mut sums = [[vdupq_n_f32(0.0); PARTS]; N];
        if product.start != Start::Zero {
            for (token, sums) in sums.iter_mut().enumerate() {
                let row = product.row(first + token, block).as_ptr().cast::<f32>();
                // SAFETY: a row has 16 sums.
                *sums = std::array::from_fn(|i| unsafe { vld1q_f32(row.add(4 * i)) });
            }
        }
        for chunk in 0..product.chunks {
            let panel = &product.panel[block * product.block_lines + chunk * LANES..][..LANES];
            let x: *const Line = product.token(first, chunk);
            // SAFETY: `Product::check` verified that the tile has lines for all N tokens.
            let x: [&Line; N] = std::array::from_fn(|token| unsafe { &*x.add(token) });
            for (word, weights) in panel.iter().enumerate() {
                // SAFETY: a line has 16 words.
                let pairs: [_; PARTS] =
                    std::array::from_fn(|i| expanded(unsafe { vld1q_u32(weights.0.as_ptr().add(4 * i)) }));
                for (x, sums) in x.iter().zip(&mut sums) {
                    let [even, odd] = expanded(vdupq_n_u32(x.0[word]));
                    for (sum, pair) in sums.iter_mut().zip(pairs) {
                        *sum = vfmaq_f32(vfmaq_f32(*sum, pair[0], even), pair[1], odd);
                    }
                }
            }
        }
        for (token, sums) in sums.iter().enumerate() {
            let row = product.row(first + token, block).as_mut_ptr().cast::<f32>();
            for (i, &sum) in sums.iter().enumerate() {
                // SAFETY: a row has 16 sums.
                unsafe { vst1q_f32(row.add(4 * i), sum) }
            }
        }
    }
    N
}

/// The values of pairs of bf16: those of the low halves and those of the high halves.
#[inline]
#[target_feature(enable = "neon")]
fn expanded(pairs: uint32x4_t) -> [float32x4_t; 2] {
    [
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)),
        vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff_0000))),
    ]
}
