//! GPU layouts of packed tensors.

use moepack_core::formats::coded::{Coded, device};
use moepack_core::pool;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::arrays::values;
use crate::error::detached;

type Array<'py, T> = Bound<'py, PyArray1<T>>;

/// Return the GPU layout of a coded tensor.
#[pyfunction]
#[pyo3(signature = (data, segment_chunks=None))]
pub fn coded_to_device<'py>(
    py: Python<'py>,
    data: PyReadonlyArray1<'py, u8>,
    segment_chunks: Option<usize>,
) -> PyResult<Array<'py, u8>> {
    let data = values(&data, "data")?;
    let made = detached(py, || {
        Coded::parse(data)?
            .view(data)?
            .to_device(segment_chunks, &*pool::current()?)
    })?;
    Ok(made.into_pyarray(py))
}

/// Return the GPU layout of a coded tensor without records, and the start of each stream.
#[pyfunction]
pub fn coded_frame<'py>(
    py: Python<'py>,
    data: PyReadonlyArray1<'py, u8>,
) -> PyResult<(Array<'py, u8>, Array<'py, u64>)> {
    let data = values(&data, "data")?;
    let frame = detached(py, || {
        Coded::parse(data)?.view(data)?.device_frame(&*pool::current()?)
    })?;
    Ok((frame.bytes.into_pyarray(py), frame.streams.into_pyarray(py)))
}

/// Undo `coded_to_device`.
#[pyfunction]
pub fn coded_from_device<'py>(py: Python<'py>, data: PyReadonlyArray1<'py, u8>) -> PyResult<Array<'py, u8>> {
    let data = values(&data, "data")?;
    let packed = detached(py, || device::from_device(data, &*pool::current()?))?;
    Ok(packed.into_pyarray(py))
}
