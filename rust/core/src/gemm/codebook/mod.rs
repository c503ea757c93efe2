//! Products by codebook weights: codes are mapped to centroids in registers, without writing a dequantized matrix to
//! memory.
//!
//! Three modes:
//!
//! * exact: `y = sum of (scale * centroid) * x` in f32. With u = 2^-24, n columns in b blocks and S = sum of |w x|,
//!   the error is at most (n / 16 + b + 7) u S.
//! * int16: the activations of a token are rounded to unsigned numbers of 8 or 4 bits, `x ~ step * (q - zero)`, over
//!   the range of the token and zero (CodeQuant, section 4, asymmetric min-max). Centroids keep all bits, and sums
//!   are exact integers within a column block. The error in addition to that of exact is at most step * 0.501 * sum
//!   of |w|.
//! * int8: like int16, with centroids rounded to 8 bits: the additional error is at most 128 * scale * sum of |x'|,
//!   with x' the rounded activations and the row's scale (its largest centroid is 32,639 scales). Tensors that store
//!   one byte per centroid have no additional error, and their int16 is int8.
//!
//! The mode auto is int8 for tensors designed for rounded activations. For other tensors it is exact with few tokens,
//! and with many it multiplies by panels of bf16 ([`rounded`]), like bf16.
//!
//! A tensor whose layout has a Hadamard width stores rotated weights; every mode rotates the activations first. The
//! bounds then apply to rotated weights and activations, plus (log2 of the width + 2) u sqrt(n) |w| |x| for the
//! rotation.
//!
//! Products of bytes on Arm are signed. NEON kernels therefore take 8-bit activations minus 128 and subtract 128 from
//! the zero point, which changes no product.
//!
//! A token that holds NaN or infinity has NaN outputs. Integer modes give the same bits on every instruction set; the
//! exact mode sums in the same order everywhere and may fuse multiplications and additions.
//!
//! In the mode int8, AMX registers multiply many tokens ([`panels`]).
//!
//! Activations are quantized once per call, for all rows. Results do not depend on the number of threads.
//!
//! Codes, centroids and scales are not checked: any bytes give a number (possibly NaN) and no out-of-bounds access.

mod grid;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod kernel;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod lanes;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod look_up;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod panels;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod pieces;
mod planes;
mod portable;
mod projection;
mod rounded;
mod tokens;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::{Codebook, MODES};

use crate::formats::codebook::{Block, Layout, PANEL};
use crate::simd::{self, Isa, Kind};
use crate::types::Mode;
use crate::{Error, Result};

/// The rounding of a product's factors: the mode as resolved for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    /// No rounding: floating point.
    Exact,
    /// Activations rounded to 4 or 8 bits, centroids not rounded.
    Int16 { activation_bits: u8 },
    /// Activations rounded to 4 or 8 bits, centroids to 8.
    Int8 { activation_bits: u8 },
}

impl Precision {
    /// The precision of a mode for a tensor. Activations have `activation_bits`, by default the bits stated by the
    /// tensor, otherwise 8.
    fn resolve(mode: Mode, activation_bits: Option<u8>, layout: &Layout) -> Result<Precision> {
        let stored = layout.activation_bits();
        let activation_bits = activation_bits.unwrap_or(if stored == 0 { 8 } else { stored });
        let precision = match mode {
            Mode::Exact | Mode::Bf16 => return Ok(Precision::Exact),
            Mode::Auto if stored == 0 => return Ok(Precision::Exact),
            // Without low bytes int8 is exact, and faster.
            Mode::Int16 if layout.planes() > 1 => Precision::Int16 { activation_bits },
            Mode::Auto | Mode::Int8 | Mode::Int16 => Precision::Int8 { activation_bits },
        };
        match activation_bits {
            4 | 8 => Ok(precision),
            bits => Err(Error::InvalidArgument(format!(
                "activations have 4 or 8 bits, not {bits}"
            ))),
        }
    }

    /// The bits per activation; `None` if they are not rounded.
    fn activation_bits(self) -> Option<u8> {
        match self {
            Precision::Exact => None,
            Precision::Int16 { activation_bits } | Precision::Int8 { activation_bits } => {
                Some(activation_bits)
            }
        }
    }
}

/// The name of the kernel for an instruction set.
pub fn kernel_name(isa: Isa) -> &'static str {
    match isa.kind() {
        Kind::Amx => "avx512, amx-int8 for 16 tokens and more in the mode int8",
        _ => simd::name_with_dot_products(isa),
    }
}

/// The scales and sums of a block's 16 rows, which convert integer sums of `BYTES` bytes per centroid to products.
struct Epilogue<const BYTES: usize> {
    scales: [f32; PANEL],
    sums: [i32; PANEL],
}

impl<const BYTES: usize> Epilogue<BYTES> {
    #[inline(always)]
    fn new(block: &Block) -> Self {
        Epilogue {
            scales: block.scales(),
            sums: block.sums(BYTES - 1),
        }
    }

    /// The rows' products with a token of the given step and zero, from their integer sums of high and low bytes
    /// times activations. Operations are not fused, so that every instruction set gives the same bits.
    #[inline(always)]
    fn products(&self, sums: &[[i32; PANEL]; BYTES], (step, zero): (f32, i32)) -> [f32; PANEL] {
        let mut out = [0.0; PANEL];
        for row in 0..PANEL {
            out[row] = if BYTES == 1 {
                let total = sums[0][row].wrapping_sub(zero.wrapping_mul(self.sums[row]));
                total as f32 * (self.scales[row] * 256.0 * step)
            } else {
                let zeros = i64::from(zero) * i64::from(self.sums[row]);
                let total = 256 * i64::from(sums[0][row]) + i64::from(sums[1][row]) - zeros;
                total as f32 * (self.scales[row] * step)
            };
        }
        out
    }
}

/// The outputs of a row block: some columns of an array of tokens x rows.
struct Rows<'a> {
    out: &'a mut [f32],
    stride: usize,
    first: usize,
}

impl<'a> Rows<'a> {
    /// The outputs of the row block whose first row is `first` of the `stride` rows of `out`.
    fn new(out: &'a mut [f32], stride: usize, first: usize) -> Rows<'a> {
        Rows { out, stride, first }
    }

    /// The number of rows, without padding.
    fn count(&self) -> usize {
        PANEL.min(self.stride - self.first)
    }

    /// Adds products to a token's outputs.
    #[inline(always)]
    fn add(&mut self, token: usize, products: &[f32; PANEL]) {
        let out = &mut self.out[token * self.stride + self.first..(token + 1) * self.stride];
        match out.first_chunk_mut::<PANEL>() {
            Some(out) => {
                for row in 0..PANEL {
                    out[row] += products[row];
                }
            }
            None => out
                .iter_mut()
                .zip(products)
                .for_each(|(out, product)| *out += product),
        }
    }
}

#[cfg(test)]
mod tests;
