//! The products of a piece of a stream's columns with those of a token.

#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::coded::{Affine, BLOCK_ROWS, LANES, QUAD, Register};
use crate::simd::{Isa, Kind};

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

/// The rounded activations of a token for a piece, four per register, none of them -128.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes<'a> {
    pub bytes: &'a [i8],
    /// The scale of the bytes.
    pub unit: f32,
    /// The sum of the bytes.
    pub sum: i32,
}

/// Adds to the sums of some tokens' rows the products of a piece, whose bytes `affine` maps to codes.
#[inline]
pub(super) fn add_bytes<const N: usize>(
    isa: Isa,
    symbols: &[Register],
    affine: Affine,
    x: [Bytes; N],
    sums: &mut [[f32; BLOCK_ROWS]; N],
) {
    // Kernels rely on this bound.
    assert!(x.iter().all(|x| x.bytes.len() >= QUAD * symbols.len()));
    match isa.kind() {
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if affine.most <= 32 => unsafe { x86::add_bytes_avx2::<N, 4>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 if affine.most <= 64 => unsafe { x86::add_bytes_avx2::<N, 2>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX2; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => unsafe { x86::add_bytes_avx2::<N, 1>(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has AVX-512, which both sets include; the bound is asserted.
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 | Kind::Amx => unsafe { x86::add_bytes_avx512(symbols, affine, x, sums) },
        // SAFETY: `isa` proves that the processor has NEON; the bound is asserted.
        #[cfg(target_arch = "aarch64")]
        Kind::Neon => add(
            &unsafe { neon::bytes(symbols, x.map(|x| x.bytes)) },
            affine,
            x,
            sums,
        ),
        _ => add(&x.map(|x| bytes_portable(symbols, x.bytes)), affine, x, sums),
    }
}

/// Adds the values of byte products to the sums of some tokens' rows.
fn add<const N: usize>(
    products: &[[i32; BLOCK_ROWS]; N],
    affine: Affine,
    x: [Bytes; N],
    sums: &mut [[f32; BLOCK_ROWS]; N],
) {
    for ((products, x), sums) in products.iter().zip(x).zip(sums) {
        for (sum, product) in sums.iter_mut().zip(products) {
            *sum += x.unit * (affine.factor * product + affine.offset * x.sum) as f32;
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
