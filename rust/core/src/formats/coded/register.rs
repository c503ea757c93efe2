//! The unit of decoding.

use super::LANES;

/// One byte per lane: 16 rows by four columns of symbols, rows first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Register(pub [u8; LANES]);

impl Register {
    /// All zeros.
    pub const ZERO: Register = Register([0; LANES]);
}
