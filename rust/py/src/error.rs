//! The core's errors as Python exceptions.

use moepack_core::Error;
use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

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
pub fn invalid<T>(message: impl Into<String>) -> Result<T, PyErr> {
    Err(PyValueError::new_err(message.into()))
}
