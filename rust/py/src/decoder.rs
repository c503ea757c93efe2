//! Decoding steps: a decoder over tensors that are read in place.

use std::sync::{Arc, OnceLock};

use moepack_core::decoder::{Lane, Past};
use moepack_core::pool;
use moepack_core::simd::{Isa, Kind};
use numpy::{PyArray2, PyArray3, PyArrayMethods, PyReadwriteArray3};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, products};
use crate::description::{Description, LayerOf, NormOf, RotaryOf};
use crate::error::detached;
use crate::held::Held;

/// The keys or values of a cache.
enum Cache<'py> {
    F32(PyReadwriteArray3<'py, f32>),
    Bf16(PyReadwriteArray3<'py, u16>),
    Bytes(PyReadwriteArray3<'py, i8>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Cache<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray3<u16>>() {
            return Ok(Cache::Bf16(array.try_readwrite()?));
        }
        if let Ok(array) = object.cast::<PyArray3<f32>>() {
            return Ok(Cache::F32(array.try_readwrite()?));
        }
        if let Ok(array) = object.cast::<PyArray3<i8>>() {
            return Ok(Cache::Bytes(array.try_readwrite()?));
        }
        let message = "a cache must be NumPy arrays [groups, capacity, width] of float32 or uint16 (bfloat16), or \
                       [groups, capacity, width + 4] of int8";
        Err(PyTypeError::new_err(message))
    }
}

impl Cache<'_> {
    fn lane(&mut self) -> PyResult<Lane<'_>> {
        Ok(match self {
            Cache::F32(array) => Lane::F32(contiguous(array.as_slice_mut(), "a cache")?),
            Cache::Bf16(array) => Lane::Bf16(contiguous(array.as_slice_mut(), "a cache")?),
            Cache::Bytes(array) => Lane::Bytes(contiguous(array.as_slice_mut(), "a cache")?),
        })
    }
}

/// A decoder of packed and dense tensors, without embedding and head, that passes one token at a time through all
/// layers.
///
/// A layer is h = x + mixer(norm x), y = h + experts(norm h). Tensors are referenced, not copied. Vectors are
/// float32, or bfloat16 as bits in uint16. A matrix is a pair of a packed tensor or `DenseMatrix` and the mode of its
/// products or None.
///
/// Args:
///     layers: a mapping for each layer (see `moepack.decoding.translation`).
///     rotary: a mapping: `frequencies`, float32, the angle of each pair of a head's values at position 1; `scale`,
///         the factor of rotated values; `order`, the order of pairs: "halves", "pairs" or "pairs to halves".
///     norm: the final norm: weight, epsilon, and an offset added to the weight.
///
/// Raises:
///     TypeError, KeyError: the description of a layer is invalid.
#[pyclass(frozen, module = "moepack._core")]
pub struct Decoder {
    description: Arc<Description>,
    /// The core's decoder for each instruction set, created at its first step.
    cores: [OnceLock<Held<Description>>; Kind::ALL.len()],
}

#[pymethods]
impl Decoder {
    #[new]
    fn new(layers: Vec<LayerOf>, rotary: RotaryOf, norm: NormOf) -> Decoder {
        let description = Description { layers, rotary, norm };
        Decoder {
            description: Arc::new(description),
            cores: [const { OnceLock::new() }; Kind::ALL.len()],
        }
    }

    /// Pass a token through all layers and return the normed output, float32 [1, hidden].
    ///
    /// Args:
    ///     x: the hidden state, float32, or bfloat16 as bits in uint16; [1, hidden], C-contiguous.
    ///     position: the position of the token.
    ///     caches: for each layer keys and values, [groups, capacity, width], float32 or bfloat16 as bits,
    ///         C-contiguous, the first visible token, and the number of tokens; the token's keys and values are appended.
    ///         In 8 bits: int8 [groups, capacity, width + 4], for each row its codes and a little-endian float32, by
    ///         which they are multiplied.
    ///         For a delta rule: the last inputs of its convolution, [1, channels, tokens], and its state, float32
    ///         [heads, width of keys, width of values], both of which are updated; the two numbers are ignored.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises:
    ///     TypeError: a matrix is not a tensor.
    ///     ValueError: sizes do not match, a cache is full, a mode does not exist, or the processor lacks the set.
    #[pyo3(signature = (x, position, caches, isa=None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        position: usize,
        mut caches: Vec<(Cache<'py>, Cache<'py>, usize, usize)>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let isa = chosen_isa(isa)?;
        if x.shape()[0] != 1 {
            return Err(PyValueError::new_err("a step takes one token"));
        }
        let hidden = x.shape()[1];
        let lanes = caches.iter_mut().map(|(keys, values, first, length)| {
            Ok(Past {
                keys: keys.lane()?,
                values: values.lane()?,
                first: *first,
                length: *length,
            })
        });
        let mut past = lanes.collect::<PyResult<Vec<_>>>()?;
        let core = self.core(py, isa)?.decoder();
        products(py, &x, hidden, hidden, |x, y| {
            let step = || core.step(x, position, &mut past, y, isa, &*pool::current()?);
            detached(py, step)
        })
    }

    fn __repr__(&self) -> String {
        format!("Decoder({} layers)", self.description.layers.len())
    }
}

impl Decoder {
    fn core(&self, py: Python<'_>, isa: Isa) -> PyResult<&Held<Description>> {
        let slot = &self.cores[isa.kind() as usize];
        if slot.get().is_none() {
            let held = Held::new(py, &self.description, |py, description| {
                description.decoder(py, isa)
            })?;
            // Another thread may have set it meanwhile; either value is fine.
            let _ = slot.set(held);
        }
        Ok(slot.get().expect("it has just been set"))
    }
}
