//! A decoder of the core over Python's arrays, kept for as long as they are: views and projections are made once a
//! model and not once a token.

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

/// Values that are read in place: float32, or bfloat16 as its bits.
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
    /// TypeError for an object that is no tensor, ValueError for an array that is not contiguous or a mode that is not.
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
    /// ValueError for an array that is not contiguous.
    pub fn values<'a>(&'a self, py: Python<'a>) -> PyResult<Activations<'a>> {
        Ok(match self {
            Vector::F32(array) => Activations::F32(values(py, array)?),
            Vector::Bf16(array) => Activations::Bf16(values(py, array)?),
        })
    }
}

/// A decoder, and the description whose tensors and arrays it reads.
pub struct Held<D> {
    // Dropped before what it reads.
    decoder: Decoder<'static>,
    _description: Arc<D>,
}

impl<D> Held<D> {
    /// The decoder that `build` makes of a description.
    ///
    /// # Errors
    /// What `build` gives.
    pub fn new(
        py: Python<'_>,
        description: &Arc<D>,
        build: impl for<'a> FnOnce(Python<'a>, &'a D) -> PyResult<Decoder<'a>>,
    ) -> PyResult<Held<D>> {
        let decoder = build(py, description)?;
        // SAFETY: only the lifetime changes. `build` knows nothing of it, so that the decoder borrows from the
        // description and from what its objects hold alone. The description is shared and never changed, does not move,
        // and is kept here, where it is dropped after the decoder; its references keep tensors and arrays, which do not
        // move either: a tensor is a frozen class in Python's heap, and NumPy does not move the values of an array that
        // others refer to. `Held` gives the decoder away by reference only, with the lifetime of that reference.
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

/// The values of an array that is kept, for as long as the reference to it.
pub fn values<'a, T: numpy::Element>(py: Python<'a>, array: &'a Py<PyArray1<T>>) -> PyResult<&'a [T]> {
    let array = array.bind(py);
    contiguous(array.try_readonly()?.as_slice().map(|_| ()), "data")?;
    // SAFETY: the array is contiguous and aligned, as was just found; the reference keeps it, and this module's classes
    // ask their users not to change what tensors hold.
    let values: &[T] = unsafe { contiguous(array.as_slice(), "data")? };
    Ok(values)
}
