//! The core's errors as Python exceptions.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moepack_core::{Error, Result};
use pyo3::exceptions::PyValueError;
use pyo3::{PyErr, PyResult, Python};

pyo3::create_exception!(
    moepack._core,
    CorruptionError,
    PyValueError,
    "Bytes of a packed tensor contradict its format or end too early."
);

pyo3::create_exception!(
    moepack._core,
    UnknownFormatError,
    CorruptionError,
    "Bytes begin with the magic of no packed format."
);

/// Converts an error of the core: the caller's fault is a `ValueError`, the bytes' fault a `CorruptionError`.
pub fn raise(error: Error) -> PyErr {
    match error {
        Error::InvalidArgument(message) => PyValueError::new_err(message),
        Error::UnknownFormat(_) => UnknownFormatError::new_err(error.to_string()),
        Error::Corruption(_) | Error::InsufficientData(_) => CorruptionError::new_err(error.to_string()),
    }
}

/// A `ValueError`.
pub fn invalid<T>(message: impl Into<String>) -> PyResult<T> {
    Err(PyValueError::new_err(message.into()))
}

/// Runs `work`, which reads packed bytes, without the interpreter lock.
///
/// Readers trust what was checked when the bytes were opened. If they are changed afterwards (a mapped file that somebody
/// writes to), readers stop by a panic instead of leaving the bytes: that is a `CorruptionError` as well. What `work`
/// was writing is given up with the error.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(done) => done.map_err(raise),
        Err(_) => Err(CorruptionError::new_err(
            "the bytes are no longer those that were opened: somebody has written to them",
        )),
    }
}
