//! How a product computes.

use crate::{Error, Result};

/// How a product computes. Every format has [`Mode::Auto`] and [`Mode::Exact`]; which others it has is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// [`Mode::Exact`] for few tokens, [`Mode::Bf16`] for many; a tensor that was made for rounded activations rounds
    /// them. What an unpacked bf16 model computes is no more precise.
    Auto,
    /// With the precision of single-precision arithmetic.
    Exact,
    /// Weights and activations rounded to bf16; experts with few tokens as in [`Mode::Exact`].
    Bf16,
    /// Activations rounded to 8 bits, weights to what integer dot products take.
    Int8,
    /// Activations rounded to 8 bits, weights as they are (centroids of two bytes).
    Int16,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 5] = [Mode::Auto, Mode::Exact, Mode::Bf16, Mode::Int8, Mode::Int16];

    /// The name that Python and the command line use.
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
    /// [`Error::InvalidArgument`]: there is no such mode.
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
