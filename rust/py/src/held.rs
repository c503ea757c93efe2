//! A decoder of the core over Python's arrays, kept for as long as they are: views and projections are made once a model
//! and not once a token.

use moepack_core::decoder::Decoder;
use moepack_core::types::Activations;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

use crate::arrays::contiguous;
use crate::layer::packed;
use crate::packed::Packed;

/// Values that are read in place: float32, or bfloat16 as its bits.
pub enum Vector {
    F32(Py<PyArray1<f32>>),
    Bf16(Py<PyArray1<u16>>),
}

impl Vector {
    fn object(&self, py: Python<'_>) -> Py<PyAny> {
        match self {
            Vector::F32(array) => array.clone_ref(py).into_any(),
            Vector::Bf16(array) => array.clone_ref(py).into_any(),
        }
    }
}

/// What a decoder is made of: tensors with their bytes, and vectors, in the order in which they were held.
pub struct Parts<'a> {
    /// Packed or dense tensors.
    pub matrices: Vec<(&'a dyn Packed, &'a [u8])>,
    /// Norms, biases and the like.
    pub vectors: Vec<Activations<'a>>,
}

/// A decoder, and the Python objects that it reads.
pub struct Held {
    // Dropped before what it reads.
    decoder: Decoder<'static>,
    _objects: Vec<Py<PyAny>>,
}

impl Held {
    /// The decoder that `build` makes of tensors and vectors.
    ///
    /// # Errors
    /// TypeError for an object that is no tensor, ValueError for an array that is not contiguous, and what `build` gives.
    pub fn new(
        py: Python<'_>,
        matrices: &[&Py<PyAny>],
        vectors: &[&Vector],
        build: impl for<'a> FnOnce(&Parts<'a>) -> PyResult<Decoder<'a>>,
    ) -> PyResult<Held> {
        let mut objects: Vec<Py<PyAny>> = Vec::new();
        let mut parts = Parts {
            matrices: Vec::with_capacity(matrices.len()),
            vectors: Vec::with_capacity(vectors.len()),
        };
        for matrix in matrices {
            let tensor = packed(matrix.bind(py))?;
            objects.push(matrix.clone_ref(py));
            objects.push(tensor.array().clone_ref(py).into_any());
            parts.matrices.push((tensor, values(py, tensor.array())?));
        }
        for vector in vectors {
            objects.push(vector.object(py));
            parts.vectors.push(match vector {
                Vector::F32(array) => Activations::F32(values(py, array)?),
                Vector::Bf16(array) => Activations::Bf16(values(py, array)?),
            });
        }
        let decoder = build(&parts)?;
        // SAFETY: only the lifetime changes. `build` knows nothing of it, so that the decoder borrows from tensors and
        // arrays alone. Both are in `objects`, which lives as long as the decoder and is dropped after it, and neither
        // moves: a tensor is a frozen class in Python's heap, and NumPy does not move the values of an array that others
        // refer to. `Held` gives the decoder away by reference only, with the lifetime of that reference.
        let decoder = unsafe { std::mem::transmute::<Decoder<'_>, Decoder<'static>>(decoder) };
        Ok(Held {
            decoder,
            _objects: objects,
        })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder<'_> {
        &self.decoder
    }
}

/// The values of an array that is kept, for as long as the reference to it.
fn values<'a, T: numpy::Element>(py: Python<'a>, array: &'a Py<PyArray1<T>>) -> PyResult<&'a [T]> {
    let array = array.bind(py);
    contiguous(array.try_readonly()?.as_slice().map(|_| ()), "data")?;
    // SAFETY: the array is contiguous and aligned, as was just found; the reference keeps it, and this module's classes
    // ask their users not to change what tensors hold.
    let values: &[T] = unsafe { contiguous(array.as_slice(), "data")? };
    Ok(values)
}
