//! Python's description of a decoder, mappings that name tensors and settings, and its conversion to the core's
//! decoder.

use moepack_core::decoder::{
    Attention, Block, Decoder as Core, Delta, Experts, FeedForward, Groups, Latent, Linear, Mixer, Norm,
    Order, Rotary, Router, Shared,
};
use moepack_core::gemm::layer::{Biases, Gate};
use moepack_core::simd::Isa;
use moepack_core::types::Activations;
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::held::{Matrix, Vector, values};

/// The parts of a decoder.
pub struct Description {
    pub layers: Vec<LayerOf>,
    pub rotary: RotaryOf,
    pub norm: NormOf,
}

/// Weight, epsilon and offset.
#[derive(FromPyObject)]
pub struct NormOf(Vector, f32, f32);

/// Weights and bias.
#[derive(FromPyObject)]
struct LinearOf(Matrix, Option<Vector>);

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct RotaryOf {
    frequencies: Py<PyArray1<f32>>,
    scale: f32,
    order: String,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct AttentionOf {
    query: LinearOf,
    key: LinearOf,
    value: LinearOf,
    output: LinearOf,
    query_norm: Option<NormOf>,
    key_norm: Option<NormOf>,
    sinks: Option<Vector>,
    gated: bool,
    width: usize,
    scale: f32,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LatentOf {
    query_latent: Option<(LinearOf, NormOf)>,
    query: LinearOf,
    latent: LinearOf,
    norm: NormOf,
    expansion: Vector,
    output: LinearOf,
    heads: usize,
    scale: f32,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct DeltaOf {
    inputs: Vec<Matrix>,
    convolution: Vector,
    decay: Vector,
    decay_bias: Vector,
    norm: NormOf,
    output: LinearOf,
    key_heads: usize,
    width: usize,
}

#[derive(FromPyObject)]
enum MixerOf {
    #[pyo3(annotation = "attention")]
    Attention(AttentionOf),
    #[pyo3(annotation = "latent attention")]
    Latent(LatentOf),
    #[pyo3(annotation = "delta rule")]
    Delta(DeltaOf),
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ExpertsOf {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    /// alpha and limit of a clamped gate.
    clamped: Option<(f32, f32)>,
    /// The biases of gate and up, interleaved, and of down.
    biases: Option<(Vector, Vector)>,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct RouterOf {
    weights: Matrix,
    bias: Option<Vector>,
    sigmoid: bool,
    correction: Option<Vector>,
    /// The number of groups, of groups kept, and of scores in a group's sum.
    groups: Option<(usize, usize, usize)>,
    top_k: usize,
    normalized: bool,
    scale: f32,
}

/// A layer in the form that `Decoder` documents.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct LayerOf {
    norm: NormOf,
    mixer: MixerOf,
    middle_norm: NormOf,
    router: Option<RouterOf>,
    experts: ExpertsOf,
    shared: Option<(ExpertsOf, Option<Matrix>)>,
}

/// Reads a description, with the interpreter that owns its objects and the instruction set of products.
#[derive(Clone, Copy)]
struct Reader<'a> {
    py: Python<'a>,
    isa: Isa,
}

impl Description {
    /// Builds the core's decoder.
    ///
    /// # Errors
    /// TypeError and ValueError for invalid tensors, arrays and settings.
    pub fn decoder<'a>(&'a self, py: Python<'a>, isa: Isa) -> PyResult<Core<'a>> {
        let reader = Reader { py, isa };
        Ok(Core {
            blocks: self
                .layers
                .iter()
                .map(|layer| reader.block(layer))
                .collect::<PyResult<_>>()?,
            rotary: reader.rotary(&self.rotary)?,
            norm: reader.norm(&self.norm)?,
        })
    }
}

impl<'a> Reader<'a> {
    fn block(self, layer: &'a LayerOf) -> PyResult<Block<'a>> {
        Ok(Block {
            norm: self.norm(&layer.norm)?,
            mixer: match &layer.mixer {
                MixerOf::Attention(attention) => Mixer::Attention(self.attention(attention)?),
                MixerOf::Latent(latent) => Mixer::Latent(self.latent(latent)?),
                MixerOf::Delta(delta) => Mixer::Delta(self.delta(delta)?),
            },
            feed_forward: FeedForward {
                norm: self.norm(&layer.middle_norm)?,
                router: layer
                    .router
                    .as_ref()
                    .map(|router| self.router(router))
                    .transpose()?,
                experts: self.experts(&layer.experts)?,
                shared: layer
                    .shared
                    .as_ref()
                    .map(|shared| self.shared(shared))
                    .transpose()?,
            },
        })
    }

    fn attention(self, described: &'a AttentionOf) -> PyResult<Attention<'a>> {
        Ok(Attention {
            query: self.linear(&described.query)?,
            key: self.linear(&described.key)?,
            value: self.linear(&described.value)?,
            output: self.linear(&described.output)?,
            query_norm: described
                .query_norm
                .as_ref()
                .map(|norm| self.norm(norm))
                .transpose()?,
            key_norm: described
                .key_norm
                .as_ref()
                .map(|norm| self.norm(norm))
                .transpose()?,
            sinks: self.vector(&described.sinks)?,
            gated: described.gated,
            width: described.width,
            scale: described.scale,
        })
    }

    fn latent(self, described: &'a LatentOf) -> PyResult<Latent<'a>> {
        let query_latent = described.query_latent.as_ref();
        let query_latent =
            query_latent.map(|(linear, norm)| PyResult::Ok((self.linear(linear)?, self.norm(norm)?)));
        Ok(Latent {
            query_latent: query_latent.transpose()?,
            query: self.linear(&described.query)?,
            latent: self.linear(&described.latent)?,
            norm: self.norm(&described.norm)?,
            expansion: described.expansion.values(self.py)?,
            output: self.linear(&described.output)?,
            heads: described.heads,
            scale: described.scale,
        })
    }

    fn delta(self, described: &'a DeltaOf) -> PyResult<Delta<'a>> {
        let inputs = described.inputs.iter();
        Ok(Delta {
            inputs: inputs
                .map(|matrix| matrix.weights(self.py, self.isa))
                .collect::<PyResult<_>>()?,
            convolution: described.convolution.values(self.py)?,
            decay: described.decay.values(self.py)?,
            decay_bias: described.decay_bias.values(self.py)?,
            norm: self.norm(&described.norm)?,
            output: self.linear(&described.output)?,
            key_heads: described.key_heads,
            width: described.width,
        })
    }

    fn router(self, described: &'a RouterOf) -> PyResult<Router<'a>> {
        Ok(Router {
            weights: described.weights.weights(self.py, self.isa)?,
            bias: self.vector(&described.bias)?,
            sigmoid: described.sigmoid,
            correction: self.vector(&described.correction)?,
            groups: described
                .groups
                .map(|(count, kept, summed)| Groups { count, kept, summed }),
            top_k: described.top_k,
            normalized: described.normalized,
            scale: described.scale,
        })
    }

    fn experts(self, described: &'a ExpertsOf) -> PyResult<Experts<'a>> {
        let biases = described.biases.as_ref().map(|(gate_up, down)| {
            PyResult::Ok(Biases {
                gate_up: gate_up.values(self.py)?,
                down: down.values(self.py)?,
            })
        });
        Ok(Experts {
            gate: described.gate.weights(self.py, self.isa)?,
            up: described.up.weights(self.py, self.isa)?,
            down: described.down.weights(self.py, self.isa)?,
            act: match described.clamped {
                Some((alpha, limit)) => Gate::Clamped { alpha, limit },
                None => Gate::Silu,
            },
            biases: biases.transpose()?,
        })
    }

    fn shared(self, (experts, gate): &'a (ExpertsOf, Option<Matrix>)) -> PyResult<Shared<'a>> {
        let gate = gate.as_ref().map(|gate| gate.weights(self.py, self.isa));
        Ok(Shared {
            experts: self.experts(experts)?,
            gate: gate.transpose()?,
        })
    }

    fn rotary(self, described: &'a RotaryOf) -> PyResult<Rotary<'a>> {
        Ok(Rotary {
            frequencies: values(self.py, &described.frequencies)?,
            scale: described.scale,
            order: match described.order.as_str() {
                "halves" => Order::Halves,
                "pairs" => Order::Pairs,
                "pairs to halves" => Order::PairsToHalves,
                other => {
                    return Err(PyValueError::new_err(format!(
                        "unknown order of pairs: {other:?}"
                    )));
                }
            },
        })
    }

    fn norm(self, NormOf(weight, epsilon, offset): &'a NormOf) -> PyResult<Norm<'a>> {
        Ok(Norm {
            weight: weight.values(self.py)?,
            epsilon: *epsilon,
            offset: *offset,
        })
    }

    fn linear(self, LinearOf(weights, bias): &'a LinearOf) -> PyResult<Linear<'a>> {
        Ok(Linear {
            weights: weights.weights(self.py, self.isa)?,
            bias: self.vector(bias)?,
        })
    }

    fn vector(self, vector: &'a Option<Vector>) -> PyResult<Option<Activations<'a>>> {
        vector.as_ref().map(|vector| vector.values(self.py)).transpose()
    }
}
