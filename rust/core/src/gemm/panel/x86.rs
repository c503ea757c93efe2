//! bf16 products with vector instructions: AVX-512 with bf16, and AVX2.

#![allow(clippy::needless_range_loop)] // Indexing arrays of registers is clearest here.

use std::arch::x86_64::*;

use super::backend::{Backend, Instructions, Product, Start};
use super::{LANES, Line};

/// Computes a product, which has been checked, with a backend of AVX-512 or AVX2.
pub(super) fn multiply(backend: Backend, product: &mut Product) {
    let mut token = 0;
    while token < product.count {
        let left = product.count - token;
        // SAFETY: the backend proves that the processor has AVX-512 with bf16, or AVX2 and FMA. Each arm multiplies at
        // most `left` tokens, all of them before `count`, and as many blocks as it matches.
        token += unsafe {
            match (backend.instructions(), product.blocks, left) {
                (Instructions::Avx512, 1, 8..) => dots::<8, 1>(product, token),
                (Instructions::Avx512, 1, 4..) => dots::<4, 1>(product, token),
                (Instructions::Avx512, 1, 2..) => dots::<2, 1>(product, token),
                (Instructions::Avx512, 1, _) => dots::<1, 1>(product, token),
                (Instructions::Avx512, _, 8..) => dots::<8, 2>(product, token),
                (Instructions::Avx512, _, 4..) => dots::<4, 2>(product, token),
                (Instructions::Avx512, _, 2..) => dots::<2, 2>(product, token),
                (Instructions::Avx512, _, _) => dots::<1, 2>(product, token),
                (Instructions::Avx2, _, 4..) => floats::<4>(product, token),
                (Instructions::Avx2, _, 2..) => floats::<2>(product, token),
                (Instructions::Avx2, _, _) => floats::<1>(product, token),
                (other, _, _) => unreachable!("{other:?} has its own kernel"),
            }
        };
    }
}

/// Multiplies `N` tokens from `first` on with `M` blocks; returns `N`.
///
/// # Safety
/// The processor has AVX-512 with bf16, the tokens exist, and the product has `M` blocks and has been checked.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dots<const N: usize, const M: usize>(product: &mut Product, first: usize) -> usize {
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    if product.start != Start::Zero {
        for (block, sums) in sums.iter_mut().enumerate() {
            for (token, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a row of sums has 64 bytes.
                *sum = unsafe { _mm512_loadu_ps(product.row(first + token, block).as_ptr().cast()) };
            }
        }
    }
    for chunk in 0..product.chunks {
        // SAFETY: `check` verified that there are lines for all chunks of the blocks and of the tile with all N
        // tokens.
        unsafe {
            let x: *const Line = product.token(first, chunk);
            let lines = product.panel.as_ptr().add(chunk * LANES);
            for word in 0..LANES {
                let mut weights = [_mm512_setzero_si512(); M];
                for (block, weights) in weights.iter_mut().enumerate() {
                    *weights = _mm512_load_si512(lines.add(block * product.block_lines + word).cast());
                }
                for token in 0..N {
                    let x = x.add(token).cast::<i32>().add(word).read();
                    let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(x));
                    for block in 0..M {
                        let weights: __m512bh = std::mem::transmute(weights[block]);
                        sums[block][token] = _mm512_dpbf16_ps(sums[block][token], weights, x);
                    }
                }
            }
        }
    }
    for (block, sums) in sums.iter().enumerate() {
        for (token, &sum) in sums.iter().enumerate() {
            // SAFETY: a row of sums has 64 bytes.
            unsafe { _mm512_storeu_ps(product.row(first + token, block).as_mut_ptr().cast(), sum) }
        }
    }
    N
}

/// Multiplies `N` tokens from `first` on with all blocks, eight rows at a time; returns `N`.
///
/// # Safety
/// The processor has AVX2 and FMA, the tokens exist, and the product has been checked.
#[target_feature(enable = "avx2,fma")]
unsafe fn floats<const N: usize>(product: &mut Product, first: usize) -> usize {
    for block in 0..product.blocks {
        let mut sums = [[_mm256_setzero_ps(); 2]; N];
        if product.start != Start::Zero {
            for (token, sums) in sums.iter_mut().enumerate() {
                let row = product.row(first + token, block);
                // SAFETY: a row of sums has 64 bytes.
                unsafe {
                    *sums = [
                        _mm256_loadu_ps(row.as_ptr().cast()),
                        _mm256_loadu_ps(row.as_ptr().add(8).cast()),
                    ]
                };
            }
        }
        let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        for chunk in 0..product.chunks {
            // SAFETY: `check` verified that there are lines for all chunks of the blocks and of the tile with all N
            // tokens; half a line has 32 bytes and is aligned.
            unsafe {
                let x: *const Line = product.token(first, chunk);
                let lines = product
                    .panel
                    .as_ptr()
                    .add(block * product.block_lines + chunk * LANES);
                for word in 0..LANES {
                    let mut weights = [[_mm256_setzero_ps(); 2]; 2];
                    for (half, weights) in weights.iter_mut().enumerate() {
                        let pairs = _mm256_load_si256(lines.add(word).cast::<__m256i>().add(half));
                        *weights = [
                            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
                            _mm256_castsi256_ps(_mm256_and_si256(pairs, high)),
                        ];
                    }
                    for (token, sums) in sums.iter_mut().enumerate() {
                        let pair = _mm256_set1_epi32(x.add(token).cast::<i32>().add(word).read());
                        let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair));
                        let odd = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
                        for half in 0..2 {
                            let sum = _mm256_fmadd_ps(weights[half][0], even, sums[half]);
                            sums[half] = _mm256_fmadd_ps(weights[half][1], odd, sum);
                        }
                    }
                }
            }
        }
        for (token, sums) in sums.iter().enumerate() {
            let row = product.row(first + token, block);
            // SAFETY: a row of sums has 64 bytes.
            unsafe {
                _mm256_storeu_ps(row.as_mut_ptr().cast(), sums[0]);
                _mm256_storeu_ps(row.as_mut_ptr().add(8).cast(), sums[1]);
            }
        }
    }
    N
}
