//! Decoding steps: a description of a decoder whose tensors are read in place.

use std::sync::OnceLock;

use moepack_core::decoder::{
    Attention, Block, Decoder as Core, Experts, FeedForward, Lane, Linear, Norm, Past, Rotary, Router,
    Shared, Weights,
};
use moepack_core::simd::Isa;
use moepack_core::types;
use moepack_core::{Result, pool};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadwriteArray3};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, products};
use crate::error::{detached, raise};
use crate::held::{Held, Vector};

/// A packed or dense tensor, and the mode of its products.
#[derive(FromPyObject)]
struct Matrix(Py<PyAny>, Option<String>);

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

const MATRICES: usize = 12;
const VECTORS: usize = 8;

/// A layer, as `Decoder` describes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Layer {
    input_norm: Vector,
    query: Matrix,
    query_bias: Option<Vector>,
    query_norm: Option<Vector>,
    key: Matrix,
    key_bias: Option<Vector>,
    key_norm: Option<Vector>,
    value: Matrix,
    value_bias: Option<Vector>,
    output: Matrix,
    output_bias: Option<Vector>,
    width: usize,
    scale: f32,
    middle_norm: Vector,
    epsilon: f32,
    router: Option<Matrix>,
    top_k: usize,
    normalized: bool,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    shared: Option<(Matrix, Matrix, Matrix)>,
    shared_gate: Option<Matrix>,
}

impl Layer {
    /// In the order in which `attention` and `feed_forward` take them.
    fn matrices(&self) -> [Option<&Matrix>; MATRICES] {
        let shared = self.shared.as_ref();
        [
            Some(&self.query),
            Some(&self.key),
            Some(&self.value),
            Some(&self.output),
            self.router.as_ref(),
            Some(&self.gate),
            Some(&self.up),
            Some(&self.down),
            shared.map(|shared| &shared.0),
            shared.map(|shared| &shared.1),
            shared.map(|shared| &shared.2),
            self.shared_gate.as_ref(),
        ]
    }

    /// In the order in which `attention` takes them, then the norm of `feed_forward`.
    fn vectors(&self) -> [Option<&Vector>; VECTORS] {
        [
            Some(&self.input_norm),
            self.query_bias.as_ref(),
            self.query_norm.as_ref(),
            self.key_bias.as_ref(),
            self.key_norm.as_ref(),
            self.value_bias.as_ref(),
            self.output_bias.as_ref(),
            Some(&self.middle_norm),
        ]
    }

    /// The layer of its tensors and vectors, which come in the order of [`Layer::matrices`] and [`Layer::vectors`].
    fn block<'a>(
        &self,
        matrices: &mut impl Iterator<Item = Result<Weights<'a>>>,
        vectors: &mut impl Iterator<Item = types::Activations<'a>>,
    ) -> Result<Block<'a>> {
        let mut weights = [const { None }; MATRICES];
        for (slot, matrix) in weights.iter_mut().zip(self.matrices()) {
            *slot = matrix.and_then(|_| matrices.next()).transpose()?;
        }
        let values = self.vectors().map(|vector| vector.and_then(|_| vectors.next()));
        let [query, key, value, output, rest @ ..] = weights;
        let [values @ .., middle_norm] = values;
        Ok(Block {
            attention: self.attention([query, key, value, output], values),
            feed_forward: self.feed_forward(rest, middle_norm),
        })
    }

    fn attention<'a>(
        &self,
        [query, key, value, output]: [Option<Weights<'a>>; 4],
        vectors: [Option<types::Activations<'a>>; VECTORS - 1],
    ) -> Attention<'a> {
        let [
            norm,
            query_bias,
            query_norm,
            key_bias,
            key_norm,
            value_bias,
            output_bias,
        ] = vectors;
        let linear = |weights: Option<Weights<'a>>, bias| Linear {
            weights: weights.expect("a layer has it"),
            bias,
        };
        Attention {
            norm: self.norm(norm).expect("a layer has it"),
            query: linear(query, query_bias),
            key: linear(key, key_bias),
            value: linear(value, value_bias),
            output: linear(output, output_bias),
            query_norm: self.norm(query_norm),
            key_norm: self.norm(key_norm),
            width: self.width,
            scale: self.scale,
        }
    }

    fn feed_forward<'a>(
        &self,
        [router, gate, up, down, first, second, third, shared_gate]: [Option<Weights<'a>>; MATRICES - 4],
        norm: Option<types::Activations<'a>>,
    ) -> FeedForward<'a> {
        let experts = |[gate, up, down]: [Option<Weights<'a>>; 3]| {
            Some(Experts {
                gate: gate?,
                up: up?,
                down: down?,
            })
        };
        FeedForward {
            norm: self.norm(norm).expect("a layer has it"),
            router: router.map(|weights| Router {
                weights,
                top_k: self.top_k,
                normalized: self.normalized,
            }),
            experts: experts([gate, up, down]).expect("a layer has them"),
            shared: experts([first, second, third]).map(|experts| Shared {
                experts,
                gate: shared_gate,
            }),
        }
    }

    fn norm<'a>(&self, weight: Option<types::Activations<'a>>) -> Option<Norm<'a>> {
        weight.map(|weight| Norm {
            weight,
            epsilon: self.epsilon,
        })
    }
}

/// A cache's keys or values.
enum Cache<'py> {
    F32(PyReadwriteArray3<'py, f32>),
    Bf16(PyReadwriteArray3<'py, u16>),
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
        let message =
            "a cache must be NumPy arrays [groups, capacity, width] of float32, or of uint16 (bfloat16)";
        Err(PyTypeError::new_err(message))
    }
}

impl Cache<'_> {
    fn lane(&mut self) -> PyResult<Lane<'_>> {
        Ok(match self {
            Cache::F32(array) => Lane::F32(contiguous(array.as_slice_mut(), "a cache")?),
            Cache::Bf16(array) => Lane::Bf16(contiguous(array.as_slice_mut(), "a cache")?),
        })
    }
}

/// A decoder of packed and dense tensors, without embedding and head, that takes one token at a time through all layers.
///
/// A layer is h = x + attention(norm x), y = h + experts(norm h). Tensors are kept, not copied; vectors are float32, or
/// bfloat16 as its bits in uint16; a matrix is a pair of a packed tensor or `DenseMatrix` and its products' mode or None.
///
/// Args:
///     layers: for each layer a mapping (`moepack.runtime.decoder` writes them).
///     frequencies: float32 [head width / 2], the angle of each pair of a head's values at position 1.
///     rotary_scale: what turned values are multiplied by.
///     norm: of the output.
///     epsilon: of that norm.
///
/// Raises:
///     TypeError, KeyError: a layer is described in another way.
#[pyclass(frozen, module = "moepack._core")]
pub struct Decoder {
    layers: Vec<Layer>,
    frequencies: Vector,
    rotary_scale: f32,
    norm: Vector,
    epsilon: f32,
    /// The core's decoder of each instruction set, made at its first step.
    cores: [OnceLock<Held>; Isa::ALL.len()],
}

#[pymethods]
impl Decoder {
    #[new]
    fn new(
        layers: Vec<Layer>,
        frequencies: Py<PyArray1<f32>>,
        rotary_scale: f32,
        norm: Vector,
        epsilon: f32,
    ) -> Decoder {
        Decoder {
            layers,
            frequencies: Vector::F32(frequencies),
            rotary_scale,
            norm,
            epsilon,
            cores: [const { OnceLock::new() }; Isa::ALL.len()],
        }
    }

    /// Takes a token through all layers: float32 [1, hidden], normed.
    ///
    /// Args:
    ///     x: its hidden state, float32, or bfloat16 as its bits in uint16; [1, hidden], C-contiguous.
    ///     position: of the token.
    ///     caches: for each layer keys and values, [groups, capacity, width], float32 or bfloat16 as its bits,
    ///         C-contiguous; the token's are written at `length`.
    ///     length: tokens that are in the caches, all of which the token sees.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises:
    ///     TypeError: a matrix is no tensor.
    ///     ValueError: sizes do not match, a cache is full, there is no such mode, or the processor lacks the set.
    #[pyo3(signature = (x, position, caches, length, isa=None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        position: usize,
        mut caches: Vec<(Cache<'py>, Cache<'py>)>,
        length: usize,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let isa = chosen_isa(isa)?;
        if x.shape()[0] != 1 {
            return Err(PyValueError::new_err("a step takes one token"));
        }
        let hidden = x.shape()[1];
        let lanes = caches.iter_mut().map(|(keys, values)| {
            Ok(Past {
                keys: keys.lane()?,
                values: values.lane()?,
                length,
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
        format!("Decoder({} layers)", self.layers.len())
    }
}

impl Decoder {
    fn core(&self, py: Python<'_>, isa: Isa) -> PyResult<&Held> {
        let slot = &self.cores[isa as usize];
        if slot.get().is_none() {
            // Another thread may have set it meanwhile: one is as good as the other.
            let _ = slot.set(self.hold(py, isa)?);
        }
        Ok(slot.get().expect("it has just been set"))
    }

    /// The core's decoder for an instruction set.
    fn hold(&self, py: Python<'_>, isa: Isa) -> PyResult<Held> {
        let matrices: Vec<&Matrix> = self.layers.iter().flat_map(Layer::matrices).flatten().collect();
        let objects: Vec<&Py<PyAny>> = matrices.iter().map(|Matrix(object, _)| object).collect();
        let mut vectors = vec![&self.frequencies, &self.norm];
        vectors.extend(self.layers.iter().flat_map(Layer::vectors).flatten());
        Held::new(py, &objects, &vectors, |parts| {
            let modes = matrices.iter().map(|Matrix(_, mode)| mode.as_deref());
            let tensors = parts.matrices.iter().zip(modes);
            let mut weights = tensors.map(|(&(tensor, data), mode)| tensor.projection(data, mode, isa));
            let mut vectors = parts.vectors.iter().copied();
            let (Some(types::Activations::F32(frequencies)), Some(norm)) = (vectors.next(), vectors.next())
            else {
                unreachable!("they come first")
            };
            let blocks = self
                .layers
                .iter()
                .map(|layer| layer.block(&mut weights, &mut vectors));
            Ok(Core {
                blocks: blocks.collect::<Result<_>>().map_err(raise)?,
                rotary: Rotary {
                    frequencies,
                    scale: self.rotary_scale,
                },
                norm: Norm {
                    weight: norm,
                    epsilon: self.epsilon,
                },
            })
        })
    }
}
