//! Products by ternary weights, for one token or many: rows are decoded during the multiplication.
//!
//! # How a product is divided
//! The units of work of [`super::layer`] are whole row groups (64 rows); a kernel computes a few at a time
//! ([`unit`]). One unit computes a row's sum from start to end, in an order determined by its codes, so results do
//! not depend on the number of threads.
//!
//! # What a row costs
//! Weights that are zero cost nothing, so the work is proportional to the codes. At a density of 0.115 a byte holds
//! 12.6 weights: 16 * 10^9 weights/s read 1.3 GB/s, far less than memory bandwidth, and every kernel is bound by its
//! loads from the first-level cache and by instructions per code. The modules of the kernels give their counts.
//!
//! Measured on one core of a Zen 4 at 3.7 GHz, P(0) = 0.885, cold weights, 10^9 weights/s on 6144x2080 / 2080x6144 /
//! 3072x768 (`cargo bench -p moepack-core --bench ternary`, fastest calls):
//!
//! | tokens | fsv8 AVX-512 | fsv8 AVX2 | fsv8 scalar | dict16 AVX-512 | dict16 scalar |
//! |---|---|---|---|---|---|
//! | 1 | 15.5 / 16.6 / 13.8 | 15.6 / 16.8 / 13.6 | 5.7 / 6.1 / 4.9 | 12.4 / 11.6 / 10.2 | 5.6 / 5.8 / 4.8 |
//! | 4 | 8.2 / 7.3 / 8.4 | 8.2 / 7.5 / 8.4 | 3.5 / 3.9 / 3.2 | | |
//! | 16 | 7.0 / 6.8 / 5.9 | 5.9 / 5.7 / 5.3 | 2.9 / 3.0 / 2.6 | 4.4 / 4.3 / 3.5 | 3.2 / 1.8 / 3.0 |
//! | 64 | 1.5 / 1.9 / 1.9 | 1.2 / 1.2 / 1.7 | | | |
//!
//! # Accuracy
//! Sums are in f32. With m non-zeros in a row, u = 2^-24 and S = sum of |w_i x_i|, the error of an output is at most
//! (m + 3) u S / (1 - (m + 3) u) for every kernel: some add activations and multiply by the levels (n, p) at the end,
//! others multiply each activation. Activations must be finite: a NaN or an infinity makes outputs of its token
//! unspecified (some kernels skip zero weights, others multiply by them). Tests check this bound for every kernel
//! against decoded weights in f64.
//!
//! # Safety on damaged tensors
//! [`TernaryView::parse`] checks only that a row's codes lie in the payload. Lookup tables are total, a word advances
//! the position by at most 255 weights, positions are clamped to the row's width every few codes, and activations are
//! followed by as many zeros as those codes can reach. Damaged codes therefore only give wrong numbers.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Tables and tiles of the vector kernels.

mod lists;
mod projection;
mod rounded;
mod scalar;
mod table;
#[cfg(test)]
mod tests;
mod tile;
mod unit;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::{MODES, Ternary};

use crate::formats::ternary::Code;
use crate::simd::{Isa, Kind, is_amd};

/// A kernel; see [`kernel_for`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Portable Rust, AVX2 or AVX-512.
    isa: Isa,
    /// Whether table entries are loaded several codes ahead for one token; never in portable Rust.
    ahead: bool,
}

impl Kernel {
    /// Portable Rust.
    pub const SCALAR: Kernel = Kernel {
        isa: Isa::SCALAR,
        ahead: false,
    };

    /// The kernels that this processor runs.
    pub fn all_available() -> impl Iterator<Item = Kernel> {
        let vectors = Isa::all_available().filter(|isa| matches!(isa.kind(), Kind::Avx2 | Kind::Avx512));
        let kernels = vectors.flat_map(|isa| [false, true].map(|ahead| Kernel { isa, ahead }));
        std::iter::once(Kernel::SCALAR).chain(kernels)
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match (self.isa.kind(), self.ahead) {
            (Kind::Avx2, true) => "avx2-ahead",
            (Kind::Avx512, true) => "avx512-ahead",
            _ => self.isa.name(),
        }
    }

    /// The instruction set of the kernel.
    pub fn isa(self) -> Isa {
        self.isa
    }
}

/// The kernel for an instruction set on this processor; always the same one.
///
/// AMD processors load table entries ahead, others do not: the module `x86::walk` gives the measurements. The results
/// have the same bits.
pub fn kernel_for(_code: Code, isa: Isa) -> Kernel {
    match isa.kind() {
        Kind::Scalar | Kind::Neon => Kernel::SCALAR,
        Kind::Avx2 | Kind::Avx512 | Kind::Amx => Kernel {
            isa: isa.vectors(),
            ahead: is_amd(),
        },
    }
}
