//! The products of a piece of a stream's columns with those of tokens.

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::prepared::Bytes;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::coded::{Affine, BLOCK_ROWS, QUAD, Register};
use crate::simd::{Isa, Kind};

/// Adds to the sums of some tokens' rows the products of a piece, whose bytes `affine` maps to codes.
#[inline]
pub(super) fn add<const N: usize, const P: usize>(
    isa: Isa,
    symbols: &[Register],
    affine: Affine,
    x: [Bytes<P>; N],
    sums: &mut [[f32; BLOCK_ROWS]; N],
) {
    const { assert!(P == 1 || P == 3) }
    // Kernels rely on this bound.
    let mut planes = x.iter().flat_map(|x| x.planes);
    assert!(planes.all(|plane| plane.len() >= QUAD * symbols.len()));
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if affine.most <= 32 => unsafe { x86::add_avx2::<N, P, 4>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if affine.most <= 64 => unsafe { x86::add_avx2::<N, P, 2>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { x86::add_avx2::<N, P, 1>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { x86::add_avx512(symbols, affine, x, sums) },
        #[cfg(target_arch = "aarch64")]
        Kind::Neon if P == 1 => {
            // SAFETY: `isa` proves that the processor has NEON; the bound is asserted.
            let products = unsafe { neon::bytes(symbols, x.map(|x| x.planes[0])) };
            for ((products, x), sums) in products.into_iter().zip(x).zip(sums) {
                add_products(&[products; P], affine, &x, sums);
            }
        }
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => {
            for (x, sums) in x.into_iter().zip(sums) {
                // SAFETY: `isa` proves that the processor has NEON; the bound is asserted.
                let products = unsafe { neon::bytes(symbols, x.planes) };
                add_products(&products, affine, &x, sums);
            }
        }
        _ => {
            for (x, sums) in x.into_iter().zip(sums) {
                let products = x.planes.map(|plane| products_portable(symbols, plane));
                add_products(&products, affine, &x, sums);
            }
        }
    }
}

/// Adds the values of the products of each plane to the sums of a token's rows. Integers stay below 2^31: 128 columns
/// of codes up to 255 and bytes up to 128 give 2^22 in a plane.
fn add_products<const P: usize>(
    products: &[[i32; BLOCK_ROWS]; P],
    affine: Affine,
    x: &Bytes<P>,
    sums: &mut [f32; BLOCK_ROWS],
) {
    for (row, sum) in sums.iter_mut().enumerate() {
        let plane = |plane: usize| affine.factor * products[plane][row] + affine.offset * x.sums[plane];
        let total = match P {
            1 => plane(0) as f32,
            _ => (256 * plane(0) + plane(1)) as f32 * 256.0 + plane(2) as f32,
        };
        *sum += x.scale * total;
    }
}

/// The dot products of rows of bytes with a plane.
fn products_portable(symbols: &[Register], plane: &[i8]) -> [i32; BLOCK_ROWS] {
    let mut sums = [0; BLOCK_ROWS];
    for (symbols, x) in symbols.iter().zip(plane.chunks_exact(QUAD)) {
        for (lane, &symbol) in symbols.0.iter().enumerate() {
            sums[lane / QUAD] += i32::from(symbol) * i32::from(x[lane % QUAD]);
        }
    }
    sums
}
