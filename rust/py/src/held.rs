//! A decoder of the core over Python's arrays. It is kept as long as the arrays, so that views and projections are
//! created once per model instead of once per token.

use std::sync::Arc;

use moepack_core::decoder::{Decoder, Weights};
use moepack_core::simd::Isa;
use moepack_core::types::Activations;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::contiguous;
use crate::error::raise;
use crate::layer::packed;

/// A packed or dense tensor, and the mode of its products.
#[derive(FromPyObject)]
pub struct Matrix(Py<PyAny>, Option<String>);

/// Values read in place: float32, or bfloat16 as bits.
pub enum Vector {
    F32(Py<PyArray1<f32>>),
    Bf16(Py<PyArray1<u16>>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Vector {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray1<u16>>() {
            return Ok(Vector::Bf16(array.to_owned().unbind()));
        }
        if let Ok(array) = object.cast::<PyArray1<f32>>() {
            return Ok(Vector::F32(array.to_owned().unbind()));
        }
        let message = "a vector must be a NumPy array [n] of float32, or of uint16 (the bits of bfloat16)";
        Err(PyTypeError::new_err(message))
    }
}

impl Matrix {
    /// The tensor with an instruction set, read in place.
    ///
    /// # Errors
    /// TypeError if the object is not a tensor, ValueError if an array is not contiguous or the mode does not exist.
    pub fn weights<'a>(&'a self, py: Python<'a>, isa: Isa) -> PyResult<Weights<'a>> {
        let tensor = packed(self.0.bind(py))?;
        let data = values(py, tensor.array())?;
        tensor.projection(data, self.1.as_deref(), isa).map_err(raise)
    }
}

impl Vector {
    /// The values, read in place.
    ///
    /// # Errors
    /// ValueError if the array is not contiguous.
    pub fn values<'a>(&'a self, py: Python<'a>) -> PyResult<Activations<'a>> {
        Ok(match self {
            Vector::F32(array) => Activations::F32(values(py, array)?),
            Vector::Bf16(array) => Activations::Bf16(values(py, array)?),
        })
    }
}

/// A decoder, and the description that owns its tensors and arrays.
pub struct Held<D> {
    // Dropped before the data that it reads.
    decoder: Decoder<'static>,
    _description: Arc<D>,
}

impl<D> Held<D> {
    /// Creates a decoder from a description by `build`.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn new(
        py: Python<'_>,
        description: &Arc<D>,
        build: impl for<'a> FnOnce(Python<'a>, &'a D) -> PyResult<Decoder<'a>>,
    ) -> PyResult<Held<D>> {
        let decoder = build(py, description)?;
        // SAFETY: only the lifetime changes. `build` does not know it, so the decoder only borrows from the
        // description and from data that its objects hold. The description is shared, never changes and does not
        // move. It is kept here and dropped after the decoder; its references keep tensors and arrays alive, which do
        // not move either: a tensor is a frozen class in Python's heap, and NumPy does not move the values of an
        // array with other references. `Held` only returns references to the decoder, with the lifetime of the
        // reference to itself.
        let decoder = unsafe { std::mem::transmute::<Decoder<'_>, Decoder<'static>>(decoder) };
        Ok(Held {
            decoder,
            _description: description.clone(),
        })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder<'_> {
        &self.decoder
    }
}

/// The values of a kept array, with the lifetime of the reference to it.
pub fn values<'a, T: numpy::Element>(py: Python<'a>, array: &'a Py<PyArray1<T>>) -> PyResult<&'a [T]> {
    let array = array.bind(py);
    contiguous(array.try_readonly()?.as_slice().map(|_| ()), "data")?;
    // SAFETY: the array is contiguous and aligned, as was just checked; the reference keeps it alive, and this
    // module's classes require that users do not change the contents of tensors.
    let values: &[T] = unsafe { contiguous(array.as_slice(), "data")? };
    Ok(values)
}
