//! The kinds of symbols that streams code.

use std::fmt;
use std::str::FromStr;

use super::{MAX_LOW_BITS, invalid};
use crate::{Error, Result};

/// What the symbols of a tensor stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symbols {
    /// Integers: a code is 2^`low_bits` times the integer of its symbol plus its low bits, which are stored
    /// uncompressed. Encoders use at most this number of low bits, the number that gives the smallest size.
    Plain {
        /// 0 to [`MAX_LOW_BITS`].
        low_bits: usize,
    },
    /// Indices of dependent codes ([`super::trellis`]).
    Dependent,
}

impl Symbols {
    /// Integers without low bits.
    pub const PLAIN: Symbols = Symbols::Plain { low_bits: 0 };

    /// The kind for the header's bytes: the number of low bits, and the kind. `None` if they are invalid.
    pub(super) fn from_bytes(bytes: [u8; 2]) -> Option<Symbols> {
        match bytes {
            [low_bits, 0] if usize::from(low_bits) <= MAX_LOW_BITS => Some(Symbols::Plain {
                low_bits: low_bits.into(),
            }),
            [0, 1] => Some(Symbols::Dependent),
            _ => None,
        }
    }

    /// The header's bytes.
    pub(super) fn to_bytes(self) -> [u8; 2] {
        match self {
            Symbols::Plain { low_bits } => [low_bits as u8, 0],
            Symbols::Dependent => [0, 1],
        }
    }

    /// The number of low bits of a code.
    pub fn low_bits(self) -> usize {
        match self {
            Symbols::Plain { low_bits } => low_bits,
            Symbols::Dependent => 0,
        }
    }

    /// Whether symbols are indices of dependent codes.
    pub fn is_dependent(self) -> bool {
        self == Symbols::Dependent
    }

    /// The factor of the stored differences of exceptions: a difference of indices is worth four codes.
    pub(super) fn difference_factor(self) -> i32 {
        match self {
            Symbols::Plain { .. } => 1,
            Symbols::Dependent => 4,
        }
    }

    /// The magnitude of a code relative to that of a symbol's integer, as a shift in bits.
    pub(super) fn shift(self) -> usize {
        match self {
            Symbols::Plain { low_bits } => low_bits,
            Symbols::Dependent => 2,
        }
    }
}

/// `plain`, `plain+1` to `plain+3` with low bits, or `dependent`.
impl fmt::Display for Symbols {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Symbols::Plain { low_bits: 0 } => out.write_str("plain"),
            Symbols::Plain { low_bits } => write!(out, "plain+{low_bits}"),
            Symbols::Dependent => out.write_str("dependent"),
        }
    }
}

impl FromStr for Symbols {
    type Err = Error;

    /// Parses what [`Display`](fmt::Display) writes.
    fn from_str(name: &str) -> Result<Symbols> {
        let plain = (0..=MAX_LOW_BITS).map(|low_bits| Symbols::Plain { low_bits });
        let mut all = plain.chain([Symbols::Dependent]);
        match all.find(|symbols| symbols.to_string() == name) {
            Some(symbols) => Ok(symbols),
            None => invalid(format!(
                "symbols are plain, plain+1 to plain+{MAX_LOW_BITS}, or dependent, not {name:?}"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_bytes_are_read_back_and_others_refused() {
        let valid = (0..=u8::MAX)
            .flat_map(|low_bits| (0..=u8::MAX).map(move |kind| [low_bits, kind]))
            .filter_map(|bytes| Some((bytes, Symbols::from_bytes(bytes)?)));
        let mut names = Vec::new();
        for (bytes, symbols) in valid {
            assert_eq!(symbols.to_bytes(), bytes);
            assert_eq!(symbols.to_string().parse(), Ok(symbols));
            names.push(symbols.to_string());
        }
        assert_eq!(names, ["plain", "dependent", "plain+1", "plain+2", "plain+3"]);
        for name in ["", "Plain", "plain+0", "plain+4", "dependent+1", "pairs"] {
            assert!(matches!(name.parse::<Symbols>(), Err(Error::InvalidArgument(_))));
        }
    }
}
