//! The products of a piece of a stream's columns with those of a token.

#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::coded::{Affine, BLOCK_ROWS, LANES, QUAD, Register};
use crate::simd::{Isa, Kind, vectorized};

/// Adds to the sum of each lane the products of its codes, signed bytes, with four activations per register.
#[inline]
pub(super) fn exact(isa: Isa, codes: &[Register], x: &[f32], sums: &mut [f32; LANES]) {
    // Kernels rely on this bound.
    assert!(x.len() >= QUAD * codes.len());
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { x86::exact_avx2(codes, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { x86::exact_avx512(codes, x, sums) },
        // SAFETY: `isa` proves that the processor has NEON; the bound is asserted.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { neon::exact(codes, x, sums) },
        _ => {
            for (codes, x) in codes.iter().zip(x.chunks_exact(QUAD)) {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum += f32::from(codes.0[lane] as i8) * x[lane % QUAD];
                }
            }
        }
    }
}

/// The sums of rows, each over four lanes.
#[inline]
pub(super) fn of_rows(sums: &[f32; LANES]) -> [f32; BLOCK_ROWS] {
    let quads = sums.as_chunks::<QUAD>().0;
    std::array::from_fn(|row| (quads[row][0] + quads[row][1]) + (quads[row][2] + quads[row][3]))
}

/// For each token and row, the dot product of the row's bytes, which are below `most` (at most 128), with the token's
/// bytes, four per register, none of them -128.
#[inline]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn bytes<const N: usize>(
    isa: Isa,
    symbols: &[Register],
    most: usize,
    x: [&[i8]; N],
) -> [[i32; BLOCK_ROWS]; N] {
    // Kernels rely on this bound.
    assert!(x.iter().all(|x| x.len() >= QUAD * symbols.len()));
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if most <= 32 => unsafe { x86::bytes_avx2::<N, 4>(symbols, x) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if most <= 64 => unsafe { x86::bytes_avx2::<N, 2>(symbols, x) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { x86::bytes_avx2::<N, 1>(symbols, x) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => x.map(|x| unsafe { x86::bytes_avx512(symbols, x) }),
        // SAFETY: `isa` proves that the processor has NEON; the bound is asserted.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => unsafe { neon::bytes(symbols, x) },
        _ => x.map(|x| bytes_portable(symbols, x)),
    }
}

vectorized! {
    /// Adds the values of byte products to the sums of some tokens' rows. Each token comes with the scale and the sum
    /// of its bytes.
    pub(super) fn add(
        products: &[[i32; BLOCK_ROWS]],
        units: &[(f32, i32)],
        affine: Affine,
        sums: &mut [[f32; BLOCK_ROWS]],
    ) = add_portable;
}

#[inline(always)]
fn add_portable(
    products: &[[i32; BLOCK_ROWS]],
    units: &[(f32, i32)],
    affine: Affine,
    sums: &mut [[f32; BLOCK_ROWS]],
) {
    for ((products, &(unit, sum)), sums) in products.iter().zip(units).zip(sums) {
        for (sums, product) in sums.iter_mut().zip(products) {
            *sums += unit * (affine.factor * product + affine.offset * sum) as f32;
        }
    }
}

fn bytes_portable(symbols: &[Register], x: &[i8]) -> [i32; BLOCK_ROWS] {
    let mut sums = [0; BLOCK_ROWS];
    for (symbols, x) in symbols.iter().zip(x.chunks_exact(QUAD)) {
        for (lane, &symbol) in symbols.0.iter().enumerate() {
            sums[lane / QUAD] += i32::from(symbol) * i32::from(x[lane % QUAD]);
        }
    }
    sums
}
