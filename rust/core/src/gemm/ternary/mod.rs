//! Products by ternary-coded weights, for one token or many: decoded on the fly, never stored.
//!
//! # How a product is cut
//! A call is a list of (expert, its tokens). Each expert's rows are cut into units of whole row groups (64 rows), by
//! sizes only, and the units of all experts run in one parallel region. A row's sum is computed by one unit from
//! start to end, in an order that its codes fix, so results do not depend on the number of threads.
//!
//! # What a row costs
//! Weights that are zero cost nothing, so the work is proportional to the codes. At a density of 0.115 weights come at
//! 12.6 a byte: 16 * 10^9 weights/s read 1.3 GB/s, far below what memory gives, and every kernel is bound by its loads
//! from the first-level cache and by instructions a code. The modules of the kernels give their counts.
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
//! Sums are of f32. With m non-zeros in a row, u = 2^-24 and S = sum of |w_i x_i|, the error of an output is at most
//! (m + 3) u S / (1 - (m + 3) u), whatever the kernel: some add activations and multiply by the levels (n, p) at the
//! end, some multiply each activation. Activations must be finite: a NaN or an infinity makes outputs
//! of its token unspecified (some kernels skip zero weights, others multiply by them). The tests hold every kernel
//! against decoded weights in f64 with this bound.
//!
//! # Safety on damaged tensors
//! [`TernaryView::parse`] proves that a row's codes lie in the payload and nothing more. Look-up tables are total, a
//! word moves the position on by at most 255 weights, positions are bounded by the row's width once in a few codes,
//! and activations are followed by as many zeros as those codes can reach. Damaged codes give wrong numbers only.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Tables and tiles of the vector kernels.

mod drive;
mod lists;
mod projection;
mod scalar;
mod table;
#[cfg(test)]
mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

use rayon::ThreadPool;

use crate::formats::ternary::{Code, TernaryView};
use crate::simd::{Isa, is_amd};
use crate::types::Activations;
use crate::{Error, Result};
use drive::Task;
pub use projection::Ternary;

/// A family of kernels; see [`kernel_for`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Portable Rust.
    Scalar,
    /// AVX2.
    Avx2,
    /// AVX2; for one token, tables are looked up ahead of their use.
    Avx2Ahead,
    /// AVX-512.
    Avx512,
    /// AVX-512; for one token, tables are looked up ahead of their use.
    Avx512Ahead,
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Kernel; 5] = [
        Kernel::Scalar,
        Kernel::Avx2,
        Kernel::Avx2Ahead,
        Kernel::Avx512,
        Kernel::Avx512Ahead,
    ];

    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Scalar => "scalar",
            Kernel::Avx2 => "avx2",
            Kernel::Avx2Ahead => "avx2-ahead",
            Kernel::Avx512 => "avx512",
            Kernel::Avx512Ahead => "avx512-ahead",
        }
    }

    /// The instruction set that the kernel needs.
    pub fn isa(self) -> Isa {
        match self {
            Kernel::Scalar => Isa::Scalar,
            Kernel::Avx2 | Kernel::Avx2Ahead => Isa::Avx2,
            Kernel::Avx512 | Kernel::Avx512Ahead => Isa::Avx512,
        }
    }
}

/// The kernel that an instruction set runs on this processor: the same one every time.
///
/// Processors of AMD look tables up ahead, others do not: the module `x86::walk` gives the measurements. The
/// results are the same bit for bit.
pub fn kernel_for(_code: Code, isa: Isa) -> Kernel {
    match (isa, is_amd()) {
        (Isa::Scalar, _) => Kernel::Scalar,
        (Isa::Avx2, false) => Kernel::Avx2,
        (Isa::Avx2, true) => Kernel::Avx2Ahead,
        (Isa::Avx512 | Isa::Amx, false) => Kernel::Avx512,
        (Isa::Avx512 | Isa::Amx, true) => Kernel::Avx512Ahead,
    }
}

/// y = W x for one expert: `x` is T x C, `y` is T x R, both row-major.
///
/// # Errors
/// [`Error::InvalidArgument`] if there is no such expert, the sizes do not match, or the processor lacks `isa`.
pub fn matmul<'a>(
    view: &TernaryView,
    expert: usize,
    x: impl Into<Activations<'a>>,
    y: &mut [f32],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    matmul_with(kernel_for(view.code(), isa.require()?), view, expert, x, y, pool)
}

/// [`matmul`] by a kernel of the caller's choice, for tests and benchmarks.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_with<'a>(
    kernel: Kernel,
    view: &TernaryView,
    expert: usize,
    x: impl Into<Activations<'a>>,
    y: &mut [f32],
    pool: &ThreadPool,
) -> Result<()> {
    let x = x.into();
    if expert >= view.experts() {
        let experts = view.experts();
        return Err(Error::InvalidArgument(format!("expert {expert} of {experts}")));
    }
    let tokens = match view.columns() {
        // Without columns the activations do not say how many tokens there are; the outputs do.
        0 => y.len() / view.rows().max(1),
        columns => x.len() / columns,
    };
    check_sizes(view, tokens, x, y)?;
    let kernel = kernel.checked()?;
    if tokens > 0 {
        drive::run(
            kernel,
            view,
            &[Task {
                expert,
                first: 0,
                tokens,
            }],
            x,
            y,
            pool,
        );
    }
    Ok(())
}

/// y = W x with each expert's own tokens: `x` is N x C and `y` is N x R, rows sorted by expert; tokens
/// `offsets[e]..offsets[e + 1]` belong to expert e, so there are E + 1 offsets, from 0 to N. Experts without tokens
/// are not read.
///
/// # Errors
/// [`Error::InvalidArgument`] if the offsets do not ascend from 0 to N, the sizes do not match, or the processor lacks
/// `isa`.
pub fn matmul_grouped<'a>(
    view: &TernaryView,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let kernel = kernel_for(view.code(), isa.require()?);
    matmul_grouped_with(kernel, view, x, offsets, y, pool)
}

/// [`matmul_grouped`] by a kernel of the caller's choice, for tests and benchmarks.
///
/// # Errors
/// As [`matmul_grouped`].
pub fn matmul_grouped_with<'a>(
    kernel: Kernel,
    view: &TernaryView,
    x: impl Into<Activations<'a>>,
    offsets: &[usize],
    y: &mut [f32],
    pool: &ThreadPool,
) -> Result<()> {
    let x = x.into();
    let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
    if offsets.len() != view.experts() + 1 || !ascending {
        return Err(Error::InvalidArgument(format!(
            "{} offsets for {} experts: they must ascend from 0 and be one more than the experts",
            offsets.len(),
            view.experts()
        )));
    }
    check_sizes(view, offsets[view.experts()], x, y)?;
    let tasks: Vec<Task> = (0..view.experts())
        .map(|expert| Task {
            expert,
            first: offsets[expert],
            tokens: offsets[expert + 1] - offsets[expert],
        })
        .filter(|task| task.tokens > 0)
        .collect();
    drive::run(kernel.checked()?, view, &tasks, x, y, pool);
    Ok(())
}

fn check_sizes(view: &TernaryView, tokens: usize, x: Activations, y: &[f32]) -> Result<()> {
    let (rows, columns) = (view.rows(), view.columns());
    if tokens.checked_mul(columns) != Some(x.len()) || tokens.checked_mul(rows) != Some(y.len()) {
        return Err(Error::InvalidArgument(format!(
            "{} activations and {} outputs for {tokens} tokens of {columns} columns and {rows} rows",
            x.len(),
            y.len()
        )));
    }
    Ok(())
}

impl Kernel {
    /// The kernel, if this processor runs it.
    fn checked(self) -> Result<Kernel> {
        self.isa().require().map(|_| self)
    }
}
