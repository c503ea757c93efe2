//! Products by group-wise integer weights, directly from the packed bytes.
//!
//! With the codes q of a row, scale s_g and offset o_g of its groups (of a symmetric tensor `o_g = -2^(bits-1) s_g`),
//! `y = sum over g of s_g * (sum of q x over g) + o_g * (sum of x over g)`: two multiplications per group besides the
//! dot product of codes and activations. Products are of integers: a token's activations are quantized symmetrically
//! for each *step* of columns, by the largest activation of the step:
//!
//! * *int8*: to 8 bits, one plane of bytes.
//! * *exact*: to 24 bits, three planes of signed bytes, each worth 256 of the next. A product is three integer
//!   products, whose sum has the precision of single-precision arithmetic: the error of an activation is at most
//!   2^-23 of the step's largest. This is faster than floats on every processor with integer dot products, because
//!   four weights share an instruction, and it gives the same bits on every instruction set.
//!
//! The mode *bf16*, also the choice of *auto*, rounds activations to bf16 and multiplies by panels of decoded weights
//! ([`panels`]) if an expert has many tokens, and is *exact* if it has few. The rest of this page describes the other
//! two.
//!
//! `sum of x` is that of the quantized activations, so both terms have the same errors, and the total is that of
//! centred weights. A step, the columns over which products add up before scaling, is a group, or 256 columns of a
//! whole row. 256 * 128 * 255 < 2^24: the sum of a plane of a step is exact in f32.
//!
//! # How a product is divided
//! One thread multiplies a block of 16 rows by all tokens of its expert, one tile of tokens at a time, and runs of
//! blocks of all experts are distributed in one parallel region ([`super::layer`]). The order of a sum depends only
//! on the tensor, so results depend neither on the number of threads, nor on which tokens share a call, nor on the
//! instruction set. The vector kernel is generic over [`lanes::Lanes`]; several tokens use matrix registers if the
//! processor has them ([`matrix`]).
//!
//! # Accuracy
//! With u = 2^-24, S = sum of |s q x| + |o x| over the quantized activations and n steps, the error is at most (2 n +
//! 6) u S. The error of a quantized activation is at most 1/254 (int8) or 2^-23 (exact) of the largest of its step,
//! plus 3 u of itself. If a step's largest activation is below 2^-100, the step counts as zero. A step with an
//! activation that is not finite makes its token's outputs NaN.
//!
//! Codes and parameters are not checked: any bytes give a number (possibly NaN) and no out-of-bounds access.

mod cursor;
mod drive;
mod kernel;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod panel_tests;
mod panels;
mod part;
mod projection;
mod rounded;
mod scalar;
#[cfg(test)]
pub(super) mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use drive::kernel_name;
pub use projection::Groupwise;
pub(super) use tile::{digit, quantize};

use crate::formats::groupwise::BLOCK_ROWS;
use crate::types::Mode;

/// The maximum number of columns of a step.
pub const STEP_COLUMNS: usize = 256;

/// The compute modes of group-wise and compensated tensors.
pub const MODES: [Mode; 4] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8];

/// The output of a kernel: a tile of tokens by the rows of a block.
type Out = [[f32; BLOCK_ROWS]; 16];

/// The precision of activations in integer products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// With 24 bits, for each token and step.
    Exact,
    /// With 8 bits, for each token and step.
    Int8,
}

impl Precision {
    /// The bytes of a quantized activation; each is a plane.
    pub(super) fn planes(self) -> usize {
        match self {
            Precision::Exact => 3,
            Precision::Int8 => 1,
        }
    }

    /// The code of a step's largest activation: 127 in the first plane, zeros below.
    fn largest(self) -> f32 {
        match self {
            Precision::Exact => 127.0 * 65536.0,
            Precision::Int8 => 127.0,
        }
    }
}
