//! Conversion of the core's errors to Python exceptions.

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
    "Bytes do not begin with the magic of a known packed format."
);

/// Converts an error of the core: invalid arguments become a `ValueError`, invalid bytes a `CorruptionError`.
pub fn raise(error: Error) -> PyErr {
    match error {
        Error::InvalidArgument(message) => PyValueError::new_err(message),
        Error::UnknownFormat(_) => UnknownFormatError::new_err(error.to_string()),
        Error::Corruption(_) | Error::InsufficientData(_) => CorruptionError::new_err(error.to_string()),
    }
}

/// Creates a `ValueError`.
pub fn invalid<T>(message: impl Into<String>) -> PyResult<T> {
    Err(PyValueError::new_err(message.into()))
}

/// Runs `work`, which reads packed bytes, without the interpreter lock.
///
/// Readers rely on the checks made when the bytes were opened. If the bytes change afterwards (a mapped file that is
/// written to), readers panic instead of reading out of bounds, and the panic becomes a `CorruptionError`. The output
/// of `work` is discarded with the error.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(done) => done.map_err(raise),
        Err(_) => Err(CorruptionError::new_err(
            "the bytes have changed since they were opened",
        )),
    }
}
