//! Group-wise integer tensors: codes of 2, 3, 4 or 8 bits, and a scale and an optional offset per group of columns.
//!
//! A weight is `scale * code + offset`; a *symmetric* tensor stores no offsets, and its weights are `scale * (code -
//! 2^(bits - 1))`. At low bit widths entropy coding would gain little, so codes have a fixed width. Kernels read them
//! in place:
//!
//! ```text
//!  0 8s magic "MOEPGRPW"   12 u8 ndim 2 or 3       16 u64 experts E    40 u64 group size: 16, 32, 64, 128, 256,
//!  8 u16 version 1         13 u8 symmetric 0 or 1  24 u64 rows R          or 0 for the whole row
//! 10 u8 bits               14 2 zeros              32 u64 columns C    48 80 zeros
//! 11 u8 parameter type: 0 bf16, 1 f16
//! blocks     for each expert, ceil(R / 16) blocks of 16 rows, each a run of records
//! a record   parameters: for each of its groups 16 scales, then (unless symmetric) 16 offsets; zeros to the next multiple
//!              of 64. Two groups share a record if the tensor is symmetric or a group has 16 columns.
//!            codes: for each 32 columns of its groups `bits` registers of 64 bytes: a 32-bit word for each of the 16 rows
//!              (crate::bits); the last record ends with the row
//! ```
//!
//! A 512-bit register thus holds one word of each of 16 rows: a shift and a mask give an operand of `vpdpbusd`, with
//! one broadcast word of activations as the other operand, and sums never cross lanes. Rows are padded to 16 and
//! columns to 32 with zeros, and all sections are aligned to 64 bytes.
//!
//! [`View::parse`] checks only the header and the size. It is cheap on a mapped file, and no code or parameter can
//! cause an out-of-bounds read. [`View::verify`] checks parameters and padding.

mod encode;
mod layout;
#[cfg(test)]
pub(crate) mod tests;
mod verify;
mod view;

pub use encode::encode;
pub use layout::{GROUP_SIZES, Layout, Spec};
pub use view::View;

use crate::{Error, Result};

/// The first eight bytes.
pub const MAGIC: [u8; 8] = *b"MOEPGRPW";
/// The version that this library writes, and the only one so far.
pub const VERSION: u16 = 1;
/// The length of the header in bytes.
pub const HEADER_BYTES: usize = 128;
/// The rows of a block: the 32-bit lanes of a 512-bit register.
pub const BLOCK_ROWS: usize = 16;
/// The bytes of a register: one word per row of a block.
pub const REGISTER_BYTES: usize = 4 * BLOCK_ROWS;

/// The type of scales and offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl ParameterType {
    /// Both types, in the order of their numbers in the header.
    pub const ALL: [ParameterType; 2] = [ParameterType::Bf16, ParameterType::F16];

    /// The torch and NumPy name.
    pub fn name(self) -> &'static str {
        match self {
            ParameterType::Bf16 => "bfloat16",
            ParameterType::F16 => "float16",
        }
    }

    /// Parses [`ParameterType::name`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the type is unknown.
    pub fn from_name(name: &str) -> Result<ParameterType> {
        ParameterType::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .map_or_else(
                || invalid(format!("parameters are float16 or bfloat16, not {name:?}")),
                Ok,
            )
    }

    /// The value of a stored parameter.
    #[inline(always)]
    pub fn value(self, bits: u16) -> f32 {
        match self {
            ParameterType::Bf16 => half::bf16::from_bits(bits).to_f32(),
            ParameterType::F16 => half::f16::from_bits(bits).to_f32(),
        }
    }

    /// The bits of a value; `None` if the type does not represent it exactly or it is not finite.
    pub fn stored(self, value: f32) -> Option<u16> {
        let bits = match self {
            ParameterType::Bf16 => half::bf16::from_f32(value).to_bits(),
            ParameterType::F16 => half::f16::from_f32(value).to_bits(),
        };
        (value.is_finite() && self.value(bits) == value).then_some(bits)
    }
}

fn corrupt<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::Corruption(format!("group-wise tensor: {what}")))
}

fn invalid<T>(what: impl std::fmt::Display) -> Result<T> {
    Err(Error::InvalidArgument(format!("group-wise tensor: {what}")))
}
