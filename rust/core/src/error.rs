//! Errors of the core, classified by cause.
//!
//! * [`Error::InvalidArgument`]: an argument is out of its domain (a shape, a level, a thread count).
//! * [`Error::Corruption`]: bytes contradict the format, because they are damaged or of another kind.
//! * [`Error::InsufficientData`]: bytes end before the format allows it.
//! * [`Error::UnknownFormat`]: bytes begin with the magic number of no known format.

use thiserror::Error;

/// The error of every fallible function of this crate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// An argument is out of its domain.
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
