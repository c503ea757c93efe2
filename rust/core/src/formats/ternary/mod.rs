//! Entropy-coded ternary tensors: a weight is its row's negative level, zero, or its positive level.
//!
//! A packed tensor is one byte array ([`layout`]) of E experts x R rows x C columns. Rows are coded independently, by
//! [`fsv8`] (the default, where a byte stands for a string of weights) or by [`dict16`] (the dictionary of the QMoE
//! paper, section 4.3). Users see codes: -1, 0 and 1. Entropy coders see symbols: 0 for zero, and 1 and 2 for the
//! levels, negative first unless a row swaps them.
//!
//! Bytes are read in place through [`TernaryView`], which does not copy them and does not trust them.

mod choose;
mod decode;
pub mod dict16;
mod encode;
pub mod fsv8;
pub mod layout;
mod levels;
mod scan;
mod verify;
mod view;

pub use decode::{
    decode_bytes, decode_codes, decode_row, decode_row_values, decode_values_bf16, decode_values_f32,
};
pub use encode::encode;
pub use levels::LevelType;
pub use view::{Metadata, PlacedRow, Row, TernaryView};

use crate::{Error, Result};

/// An entropy code for ternary rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// 8-bit finite-state codes; see [`fsv8`].
    Fsv8,
    /// 16-bit codes of the QMoE paper; see [`dict16`].
    Dict16,
}

impl Code {
    /// All codes.
    pub const ALL: [Code; 2] = [Code::Fsv8, Code::Dict16];

    /// The number that the header stores.
    pub fn id(self) -> u8 {
        self as u8
    }

    /// Inverts [`Code::id`].
    pub fn from_id(id: u8) -> Option<Code> {
        Code::ALL.get(usize::from(id)).copied()
    }

    /// `fsv8` or `dict16`.
    pub fn name(self) -> &'static str {
        match self {
            Code::Fsv8 => "fsv8",
            Code::Dict16 => "dict16",
        }
    }

    /// Parses [`Code::name`].
    pub fn from_name(name: &str) -> Result<Code> {
        Code::ALL
            .into_iter()
            .find(|code| code.name() == name)
            .ok_or_else(|| {
                Error::InvalidArgument(format!("unknown ternary code {name:?}: use fsv8 or dict16"))
            })
    }
}
