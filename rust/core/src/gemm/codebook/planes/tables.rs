//! The tables of a token: sums of its activations.
//!
//! Four activations have 16 sums, one for each subset. A lane of a line of codes holds in each half of a byte a
//! subset of the columns k, 4 + k, 8 + k and 12 + k, so a token has a table for each lane. 8-bit activations have two
//! tables, of their low and of their high halves: a sum is then at most 60, and a byte holds the sum of four of them.

use crate::formats::codebook::BLOCK_UNIT;
use crate::formats::codebook::bits::LANE;
use crate::simd::{Isa, Kind};

/// The tables and sums of a token.
#[derive(Default)]
pub struct Tables {
    /// For each 16 columns, for each pair of lanes (0 and 1, 2 and 3), for each half of an activation, 2 tables of
    /// 16.
    pub bytes: Vec<[u8; 2 * LANE]>,
    /// The sums of the activations in each [`BLOCK_UNIT`] of columns.
    pub totals: Vec<u32>,
}

/// The number of half-bytes, each with its own tables, of an activation.
pub(in crate::gemm::codebook) const fn halves(activation_bits: u8) -> usize {
    if activation_bits == 8 { 2 } else { 1 }
}

impl Tables {
    /// The tables for a token's codes of 4 or 8 bits, whose number is a multiple of 16.
    ///
    /// # Panics
    /// If the set is not the one of [`by_tables`](super::by_tables).
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
    pub fn new(isa: Isa, codes: &[u8], activation_bits: u8) -> Tables {
        assert!(isa.kind() == Kind::Avx2);
        let totals = codes.chunks(BLOCK_UNIT);
        let totals = totals.map(|codes| codes.iter().map(|&code| u32::from(code)).sum());
        let mut bytes = vec![[0; 2 * LANE]; codes.len() / LANE * 2 * halves(activation_bits)];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` proves that the processor has AVX2.
        unsafe {
            match activation_bits {
                8 => x86::fill::<2>(codes, &mut bytes),
                _ => x86::fill::<1>(codes, &mut bytes),
            }
        }
        Tables {
            bytes,
            totals: totals.collect(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::LANE;

    /// The shuffle of column 4c + k, for lanes `k` and k + 1, into the table entries whose subset contains it; zeros
    /// elsewhere.
    const fn choices(k: usize, c: usize) -> [u8; 2 * LANE] {
        let mut places = [0x80; 2 * LANE];
        let mut i = 0;
        while i < 2 * LANE {
            if (i % LANE) >> c & 1 == 1 {
                places[i] = (4 * c + k + i / LANE) as u8;
            }
            i += 1;
        }
        places
    }

    static CHOICES: [[[u8; 2 * LANE]; 4]; 2] = [
        [choices(0, 0), choices(0, 1), choices(0, 2), choices(0, 3)],
        [choices(2, 0), choices(2, 1), choices(2, 2), choices(2, 3)],
    ];

    /// Fills the tables of a token whose activations have `HALVES` halves.
    #[target_feature(enable = "avx2")]
    pub fn fill<const HALVES: usize>(codes: &[u8], out: &mut [[u8; 2 * LANE]]) {
        let half = _mm256_set1_epi8(15);
        let lines = codes.as_chunks::<LANE>().0.iter();
        for (codes, out) in lines.zip(out.chunks_exact_mut(2 * HALVES)) {
            // SAFETY: the array has the 16 bytes.
            let codes = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
            for which in 0..HALVES {
                let half_codes = match which {
                    0 => _mm256_and_si256(codes, half),
                    _ => _mm256_and_si256(_mm256_srli_epi16::<4>(codes), half),
                };
                for (pair, choices) in CHOICES.iter().enumerate() {
                    let mut sums = _mm256_setzero_si256();
                    for choices in choices {
                        // SAFETY: the array has the 32 bytes.
                        let places = unsafe { _mm256_loadu_si256(choices.as_ptr().cast()) };
                        sums = _mm256_add_epi8(sums, _mm256_shuffle_epi8(half_codes, places));
                    }
                    let out = &mut out[pair * HALVES + which];
                    // SAFETY: the array has the 32 bytes.
                    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), sums) };
                }
            }
        }
    }
}
