//! Products by 2-bit codes stored as bit planes ([`crate::formats::codebook::bits`]).
//!
//! There are two kernel designs, which share one order of the codes: dot products with centroids permuted into
//! registers ([`shuffles`], AVX-512), and T-MAC's table lookup over bit planes ([`lookups`], AVX2); see
//! [`by_tables`].

#[cfg(target_arch = "x86_64")]
pub(super) mod lines;
#[cfg(target_arch = "x86_64")]
pub(super) mod lookups;
#[cfg(target_arch = "x86_64")]
pub(super) mod shuffles;
pub(super) mod tables;

use super::Precision;
use crate::simd::{Isa, Kind};

/// Returns whether products with codes of `bits` bits look up activations in tables instead of looking up centroids.
///
/// Microseconds on Zen 4 with one thread and 8-bit activations, for AVX2 shuffles of centroids (codes in the order of
/// 4 bits), AVX2 tables (equal in int16 and int8), and AVX-512 permutations, all without [`super::pieces`]:
///
/// | rows x columns | tokens | shuffles, int8 | int16 | tables | permutations, int8 | int16 |
/// |---|---|---|---|---|---|---|
/// | 14336 x 4096, from memory | 1 | 2579 | 3879 | 1705 | 859 | 1151 |
/// | 14336 x 4096, from memory | 16 | 27551 | 57858 | 19059 | 5491 | 9793 |
/// | 768 x 2048, in the cache | 1 | 53 | 85 | 35 | 20 | 30 |
/// | 768 x 2048, in the cache | 4 | 215 | 421 | 160 | 50 | 75 |
/// | 768 x 2048, in the cache | 16 | 828 | 1633 | 624 | 183 | 283 |
/// | 768 x 2048, in the cache | 256 | 10758 | 21602 | 8384 | 2515 | 4183 |
///
/// Only the instruction set matters: with AVX2, tables are 1.3 to 1.5 times as fast as shuffles in int8 and 2.3 to
/// 2.6 times in int16; with AVX-512, permutations are faster than both. With 3 bits a product takes seven masks
/// instead of three: tables are 1.3 times as fast in int16 but slower in int8, so 3 bits use shuffles.
pub(super) fn by_tables(bits: u8, precision: Precision, isa: Isa) -> bool {
    bits == 2 && isa.kind() == Kind::Avx2 && precision != Precision::Exact
}
