//! Compute modes of products.

use crate::{Error, Result};

/// The compute mode of a product. Every format has [`Mode::Auto`] and [`Mode::Exact`]; other modes depend on the
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// [`Mode::Exact`] for few tokens, [`Mode::Bf16`] for many; tensors designed for rounded activations round them.
    /// This is at least as precise as an unpacked bf16 model.
    Auto,
    /// The precision of single-precision arithmetic. Like [`Mode::Bf16`], it ignores the activation bits of tensors
    /// designed for rounded activations.
    Exact,
    /// Weights and activations rounded to bf16; experts with few tokens as in [`Mode::Exact`].
    Bf16,
    /// Activations rounded to 8 bits, weights to the operands of integer dot products.
    Int8,
    /// Activations rounded to 8 bits, weights not rounded (two-byte centroids).
    Int16,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 5] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8, Mode::Int16];

    /// The name in Python and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Exact => "exact",
            Mode::Bf16 => "bf16",
            Mode::Int8 => "int8",
            Mode::Int16 => "int16",
        }
    }

    /// Parses [`Mode::name`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the mode is unknown.
    pub fn from_name(name: &str) -> Result<Mode> {
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| {
            let names = Mode::ALL.map(Mode::name).join(", ");
            Error::InvalidArgument(format!("unknown mode {name:?}: use one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for mode in Mode::ALL {
            assert_eq!(Mode::from_name(mode.name()), Ok(mode));
        }
        assert!(Mode::from_name("int7").is_err());
    }
}
