//! Products by group-wise integer weights, straight from the packed bytes.
//!
//! With the codes q of a row, scale s_g and offset o_g of its groups (of a symmetric tensor `o_g = -2^(bits-1) s_g`),
//! `y = sum over g of s_g * (sum of q x over g) + o_g * (sum of x over g)`: two multiplications a group beside the dot
//! product of codes and activations. Products are of integers: a token's activations are quantized for each *step* of
//! columns, symmetrically, by the largest of the step:
//!
//! * *int8*: to 8 bits, one plane of bytes.
//! * *exact*: to 24 bits, three planes of signed bytes, each worth 256 of the next. A product is three integer products,
//!   whose sum has the precision of single-precision arithmetic: an activation is off by at most 2^-23 of the step's
//!   largest. That is faster than floats on every processor but those without integer dot products, since four
//!   weights share an instruction, and it gives the same bits on every instruction set.
//!
//! A third mode, *bf16*, also called *auto*, rounds activations to bf16 and multiplies panels of decoded weights
//! ([`panels`]) where an expert has many tokens, and is *exact* where it has few. What follows is about the other two.
//!
//! `sum of x` is that of the quantized activations, so that both terms err alike and the error is that of centred
//! weights. A step is a group, or 256 columns of a whole row: the columns over which products add up before they are
//! scaled. 256 * 128 * 255 < 2^24: the sum of a plane of a step is exact in f32.
//!
//! # How a product is cut
//! A block of 16 rows by all tokens of its expert is computed by one thread, tile after tile of tokens, and runs of
//! blocks of all experts are handed out in one parallel region ([`super::layer`]). The order of a sum depends on nothing but
//! the tensor, so results depend neither on the number of threads, nor on which tokens share a call, nor on the
//! instruction set.
//! The kernel is written once over [`lanes::Lanes`]; several tokens go through matrix registers where there are some
//! ([`matrix`]).
//!
//! # Accuracy
//! With u = 2^-24, S = sum of |s q x| + |o x| over the quantized activations and n steps, the error is at most
//! (2 n + 6) u S. A quantized activation is off by at most 1/254 (int8) or 2^-23 (exact) of the largest of its step, and
//! 3 u of itself. Where a step's largest activation is below 2^-100, the step counts as zero. A step with an activation
//! that is not finite makes its token's outputs NaN.
//!
//! Codes and parameters are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

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

pub use projection::Groupwise;
pub(super) use tile::{digit, quantize};

#[cfg(target_arch = "x86_64")]
use super::panel::Backend;
use crate::formats::groupwise::BLOCK_ROWS;
use crate::simd::Isa;
use crate::types::Mode;

/// Most columns of a step.
pub const STEP_COLUMNS: usize = 256;

/// The modes that group-wise tensors have, also compensated ones.
pub const MODES: [Mode; 4] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8];

/// What a kernel writes: a tile of tokens by the rows of a block.
type Out = [[f32; BLOCK_ROWS]; 16];

/// How activations enter integer products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// With 24 bits, for each token and step.
    Exact,
    /// With 8 bits, for each token and step.
    Int8,
}

impl Precision {
    /// Bytes of a quantized activation, each of which is a plane.
    fn planes(self) -> usize {
        match self {
            Precision::Exact => 3,
            Precision::Int8 => 1,
        }
    }

    /// What the largest activation of a step becomes: 127 in the first plane, zeros below.
    fn largest(self) -> f32 {
        match self {
            Precision::Exact => 127.0 * 65536.0,
            Precision::Int8 => 127.0,
        }
    }
}

/// What computes a product on this processor with an instruction set that it runs.
pub fn kernel_name(isa: Isa) -> &'static str {
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::Neon if crate::simd::has_dot_products() => "neon-dotprod",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 if x86::has_avx_vnni() => "avx-vnni",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if Backend::of_bf16(isa).is_some() => "avx512-vnni, avx512-bf16 in the mode bf16",
        Isa::Avx512 => "avx512-vnni",
        Isa::Amx => "avx512-vnni, amx-int8 for 5 tokens and more, amx-bf16 in the mode bf16",
        _ => isa.name(),
    }
}
