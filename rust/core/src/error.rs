//! What can go wrong in the core, sorted by whose fault it is.
//!
//! * [`Error::InvalidArgument`]: the caller passed something that has no meaning (a shape, a level, a thread count).
//! * [`Error::Corruption`]: bytes contradict the format; they were damaged or never were of this format.
//! * [`Error::InsufficientData`]: bytes end before the format says they may.
//! * [`Error::UnknownFormat`]: bytes begin with the magic of no format that this process knows.

use thiserror::Error;

/// The error of every fallible function of this crate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// The caller's argument is out of its domain.
    #[error("{0}")]
    InvalidArgument(String),
    /// The bytes contradict the format.
    #[error("corrupt data: {0}")]
    Corruption(String),
    /// The bytes end too early.
    #[error("truncated data: {0}")]
    InsufficientData(String),
    /// No format begins with these bytes.
    #[error("unknown packed format {0}")]
    UnknownFormat(String),
}

/// The result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;
