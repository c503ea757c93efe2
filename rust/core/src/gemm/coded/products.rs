//! The products of a piece of a stream's columns by those of a token.

#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::formats::coded::{BLOCK_ROWS, LANES, QUAD, Register};
use crate::simd::Isa;

/// Adds to the sum of each lane the products of its codes, signed bytes, by four activations a register. `isa` must have
/// been found available.
#[inline]
pub(super) fn exact(isa: Isa, codes: &[Register], x: &[f32], sums: &mut [f32; LANES]) {
    // Kernels rely on it.
    assert!(x.len() >= QUAD * codes.len());
    match isa {
        // SAFETY: the processor runs the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::exact_avx2(codes, x, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { x86::exact_avx512(codes, x, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::exact(codes, x, sums) },
        _ => {
            for (codes, x) in codes.iter().zip(x.chunks_exact(QUAD)) {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum += f32::from(codes.0[lane] as i8) * x[lane % QUAD];
                }
            }
        }
    }
}

/// The sums of rows of four lanes each.
#[inline]
pub(super) fn of_rows(sums: &[f32; LANES]) -> [f32; BLOCK_ROWS] {
    let quads = sums.as_chunks::<QUAD>().0;
    std::array::from_fn(|row| (quads[row][0] + quads[row][1]) + (quads[row][2] + quads[row][3]))
}

/// For each row the products of bytes by four signed ones a register, which are no -128. The bytes are below 64, or if
/// `WIDE` below 128. `isa` must have been found available.
#[inline]
pub(super) fn bytes<const WIDE: bool>(isa: Isa, symbols: &[Register], x: &[i8]) -> [i32; BLOCK_ROWS] {
    // Kernels rely on it.
    assert!(x.len() >= QUAD * symbols.len());
    match isa {
        // SAFETY: the processor runs the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::bytes_avx2::<WIDE>(symbols, x) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { x86::bytes_avx512(symbols, x) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::bytes(symbols, x) },
        _ => {
            let mut sums = [0; BLOCK_ROWS];
            for (symbols, x) in symbols.iter().zip(x.chunks_exact(QUAD)) {
                for (lane, &symbol) in symbols.0.iter().enumerate() {
                    sums[lane / QUAD] += i32::from(symbol) * i32::from(x[lane % QUAD]);
                }
            }
            sums
        }
    }
}
