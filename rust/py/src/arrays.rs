//! NumPy arrays on their way in and out: what every packed format asks of its arguments and results.

use moepack_core::Result;
use moepack_core::simd::{self, Isa};
use moepack_core::types;
use numpy::{Element, PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2};
use numpy::{PyUntypedArrayMethods, dtype};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::raise;

/// The values of an array, or a ValueError that names it.
pub fn contiguous<T>(slice: std::result::Result<T, numpy::AsSliceError>, name: &str) -> PyResult<T> {
    slice.map_err(|_| PyValueError::new_err(format!("{name} must be C-contiguous")))
}

/// What `work` makes of the bytes of a packed tensor, without the interpreter lock.
pub fn reading<T: Send>(
    py: Python<'_>,
    data: &Py<PyArray1<u8>>,
    work: impl FnOnce(&[u8]) -> Result<T> + Send,
) -> PyResult<T> {
    let data = data.bind(py).try_readonly()?;
    let data = contiguous(data.as_slice(), "data")?;
    py.detach(|| work(data)).map_err(raise)
}

/// An array of zeros; MemoryError if there is no room for it.
pub fn zeros<'py, T: Element>(py: Python<'py>, shape: [usize; 3]) -> PyResult<Bound<'py, PyArray3<T>>> {
    Ok(py
        .import("numpy")?
        .call_method1("zeros", (shape, dtype::<T>(py)))?
        .cast_into()?)
}

/// Activations [tokens, columns]: float32, or the bits of bfloat16 as uint16.
pub enum Activations<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    Bf16(PyReadonlyArray2<'py, u16>),
}

/// By hand, because the derived code words an error message for each variant that does not match: two calls into
/// Python a dtype, 10 us of a decoding step.
impl<'a, 'py> FromPyObject<'a, 'py> for Activations<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray2<u16>>() {
            return Ok(Activations::Bf16(array.try_readonly()?));
        }
        if let Ok(array) = object.cast::<PyArray2<f32>>() {
            return Ok(Activations::F32(array.try_readonly()?));
        }
        let message =
            "x must be a NumPy array [tokens, columns] of float32, or of uint16 (the bits of bfloat16)";
        Err(PyTypeError::new_err(message))
    }
}

impl Activations<'_> {
    pub fn shape(&self) -> [usize; 2] {
        let shape = match self {
            Activations::F32(x) => x.shape(),
            Activations::Bf16(x) => x.shape(),
        };
        [shape[0], shape[1]]
    }

    pub fn values(&self) -> PyResult<types::Activations<'_>> {
        Ok(match self {
            Activations::F32(x) => contiguous(x.as_slice(), "x")?.into(),
            Activations::Bf16(x) => contiguous(x.as_slice(), "x")?.into(),
        })
    }
}

/// The instruction set of a name, or the active one.
pub fn chosen_isa(name: Option<&str>) -> PyResult<Isa> {
    name.map_or_else(simd::active, Isa::from_name).map_err(raise)
}

/// The offsets [experts + 1] of a grouped product.
pub fn expert_offsets(offsets: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<usize>> {
    let offsets = offsets.as_array();
    let offsets: std::result::Result<Vec<_>, _> =
        offsets.iter().map(|&offset| usize::try_from(offset)).collect();
    offsets.map_err(|_| PyValueError::new_err("offsets must not be negative"))
}

/// A new array [tokens, rows] that `product` fills from activations of `columns` columns.
pub fn products<'py>(
    py: Python<'py>,
    x: &Activations<'py>,
    rows: usize,
    columns: usize,
    product: impl FnOnce(types::Activations, &mut [f32]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let [tokens, width] = x.shape();
    if width != columns {
        return Err(PyValueError::new_err(format!(
            "x has {width} columns instead of {columns}"
        )));
    }
    let out = zeros::<f32>(py, [1, tokens, rows])?;
    let mut borrowed = out.try_readwrite()?;
    product(x.values()?, contiguous(borrowed.as_slice_mut(), "output")?)?;
    drop(borrowed);
    out.reshape([tokens, rows])
}

/// A new array that `work` fills.
pub fn filled<'py, T: Element>(
    py: Python<'py>,
    shape: [usize; 3],
    work: impl FnOnce(&mut [T]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyArray3<T>>> {
    let out = zeros::<T>(py, shape)?;
    let mut borrowed = out.try_readwrite()?;
    work(contiguous(borrowed.as_slice_mut(), "output")?)?;
    drop(borrowed);
    Ok(out)
}
