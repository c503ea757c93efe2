//! NumPy arrays as inputs and outputs: checks shared by all functions, and results allocated by Python, so that a
//! failed allocation is a MemoryError.

use moepack_core::simd::{self, Isa};
use moepack_core::types;
use numpy::ndarray::Dimension;
use numpy::{
    Element, PyArray, PyArray2, PyArrayMethods, PyReadonlyArray, PyReadonlyArray1, PyReadonlyArray2,
};
use numpy::{PyReadwriteArray, PyUntypedArrayMethods, dtype};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{invalid, raise};

/// The values of an array, or a ValueError that names it.
pub fn contiguous<T>(slice: Result<T, numpy::AsSliceError>, name: &str) -> PyResult<T> {
    slice.or_else(|_| invalid(format!("{name} must be C-contiguous")))
}

/// The values of an argument.
pub fn values<'a, T: Element, D: Dimension>(
    array: &'a PyReadonlyArray<'_, T, D>,
    name: &str,
) -> PyResult<&'a [T]> {
    contiguous(array.as_slice(), name)
}

/// The values of an argument that may be absent.
pub fn optional<'a, T: Element, D: Dimension>(
    array: &'a Option<PyReadonlyArray<'_, T, D>>,
    name: &str,
) -> PyResult<Option<&'a [T]>> {
    array.as_ref().map(|array| values(array, name)).transpose()
}

/// The lengths of the axes of an array with `N` axes.
pub fn lengths<'py, T: PyUntypedArrayMethods<'py>, const N: usize>(array: &T) -> [usize; N] {
    array
        .shape()
        .try_into()
        .expect("the type fixes the number of axes")
}

/// Numbers that must not be negative.
pub fn counts(array: &PyReadonlyArray1<'_, i64>, name: &str) -> PyResult<Vec<usize>> {
    let counts: Result<Vec<_>, _> = array.as_array().iter().map(|&n| usize::try_from(n)).collect();
    counts.or_else(|_| invalid(format!("{name} must not be negative")))
}

/// A new array of zeros.
pub fn zeros<'py, T: Element, D: Dimension, const N: usize>(
    py: Python<'py>,
    shape: [usize; N],
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    allocated(py, "zeros", shape)
}

/// A new array from a NumPy function that takes a shape and a dtype.
fn allocated<'py, T: Element, D: Dimension, const N: usize>(
    py: Python<'py>,
    function: &str,
    shape: [usize; N],
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let array = py
        .import("numpy")?
        .call_method1(function, (shape, dtype::<T>(py)))?;
    Ok(array.cast_into()?)
}

/// The writable values of an array of [`zeros`].
pub fn places<'a, T: Element, D: Dimension>(
    array: &'a mut PyReadwriteArray<'_, T, D>,
) -> PyResult<&'a mut [T]> {
    contiguous(array.as_slice_mut(), "the result")
}

/// A new array, written by `fill`.
pub fn filled<'py, T: Element, D: Dimension, const N: usize>(
    py: Python<'py>,
    shape: [usize; N],
    fill: impl FnOnce(&mut [T]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let out = zeros(py, shape)?;
    fill(places(&mut out.try_readwrite()?)?)?;
    Ok(out)
}

/// Activations [tokens, columns]: float32, or the bits of bfloat16 as uint16.
pub enum Activations<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    Bf16(PyReadonlyArray2<'py, u16>),
}

/// Implemented by hand, because the derived code formats an error message for each variant that does not match: two
/// calls into Python per dtype, 10 us of a decoding step.
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
        match self {
            Activations::F32(x) => lengths(&**x),
            Activations::Bf16(x) => lengths(&**x),
        }
    }

    pub fn values(&self) -> PyResult<types::Activations<'_>> {
        Ok(match self {
            Activations::F32(x) => values(x, "x")?.into(),
            Activations::Bf16(x) => values(x, "x")?.into(),
        })
    }
}

/// The instruction set with a name, or the active one.
pub fn chosen_isa(name: Option<&str>) -> PyResult<Isa> {
    name.map_or_else(simd::active, Isa::named).map_err(raise)
}

/// A new array [tokens, rows], which `product` fills from activations of `columns` columns.
pub fn products<'py>(
    py: Python<'py>,
    x: &Activations<'py>,
    rows: usize,
    columns: usize,
    product: impl FnOnce(types::Activations, &mut [f32]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let [tokens, width] = x.shape();
    if width != columns {
        return invalid(format!("x has {width} columns instead of {columns}"));
    }
    // Products write every output, and zeroing them first took a tenth of the time of a product with 256 tokens.
    let y = allocated(py, "empty", [tokens, rows])?;
    product(x.values()?, places(&mut y.try_readwrite()?)?)?;
    Ok(y)
}
