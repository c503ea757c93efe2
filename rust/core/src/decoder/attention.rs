//! Grouped-query attention.

use std::sync::OnceLock;

use super::norm::Norm;
use super::output::Output;
use super::past::{Own, Past};
use super::rotary::Rotation;
use super::softmax::{Reading, Rows, Softmax};
use super::step::Mixing;
use super::{Linear, require};
use crate::Result;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::Thread;
use crate::gemm::layer::{Job, Projection, sigmoid};
use crate::simd::Isa;
use crate::types::Activations;

/// Attention with heads that share keys and values in groups.
pub struct Attention<'a> {
    /// Queries: heads * width rows, or twice as many for gated outputs: for each head the query, then the gate.
    pub query: Linear<'a>,
    /// Keys: groups * width rows; groups divide heads.
    pub key: Linear<'a>,
    /// Values: as many rows as keys.
    pub value: Linear<'a>,
    /// The output projection: heads * width columns.
    pub output: Linear<'a>,
    /// The norm of queries, per head or over all heads, depending on its length.
    pub query_norm: Option<Norm<'a>>,
    /// The norm of keys, likewise.
    pub key_norm: Option<Norm<'a>>,
    /// For each head, a score that belongs to no token but takes part in the softmax.
    pub sinks: Option<Activations<'a>>,
    /// Whether outputs are multiplied by the sigmoid of a gate.
    pub gated: bool,
    /// The number of values of a head; the first ones are rotated.
    pub width: usize,
    /// The factor of products of queries and keys.
    pub scale: f32,
}

/// A token's queries, keys and values, rotated to its position.
struct Heads {
    /// heads x width.
    queries: Vec<f32>,
    /// heads x width; empty without gates.
    gates: Vec<f32>,
    /// groups x width.
    keys: Own,
    /// groups x width.
    values: Own,
}

/// The attention of a step.
struct Step<'a> {
    weights: &'a Attention<'a>,
    past: Past<'a>,
    inputs: Matrices<'a>,
    output: Output<'a>,
    /// The memory that the inputs read first.
    prefetch: Prefetch<'a>,
    heads: OnceLock<Heads>,
    softmax: Softmax,
    mixed: OnceLock<Vec<f32>>,
    isa: Isa,
}

impl Attention<'_> {
    fn heads(&self) -> usize {
        self.output.weights.shape().columns / self.width.max(1)
    }

    fn groups(&self) -> usize {
        self.key.weights.shape().rows / self.width.max(1)
    }

    pub(super) fn mixing<'a>(&'a self, past: Past<'a>, threads: usize, isa: Isa) -> Box<dyn Mixing + 'a> {
        let inputs = [&self.query, &self.key, &self.value].map(|linear| &*linear.weights);
        let inputs: [&dyn Projection; 3] = inputs;
        let inputs = Matrices::new(&inputs, Job::of_offsets(&[0, 1]), threads);
        Box::new(Step {
            weights: self,
            softmax: Softmax::new(self.heads(), self.groups(), &past),
            past,
            prefetch: inputs.prefetch(threads),
            inputs,
            output: Output::new(&self.output, threads),
            heads: OnceLock::new(),
            mixed: OnceLock::new(),
            isa,
        })
    }

    pub(super) fn check(&self, hidden: usize, rotated: usize) -> Result<()> {
        let (columns, few) = (self.output.weights.shape().columns, self.key.weights.shape().rows);
        let width = self.width.max(1);
        let fits = self.width > 0 && few > 0 && few % width == 0 && columns > 0 && columns % few == 0;
        require(fits && rotated <= width, || {
            format!(
                "the sizes of attention do not match: {columns} outputs and {few} rows of keys \
                 for heads of width {width}, {rotated} rotated"
            )
        })?;
        let rows = if self.gated { 2 * columns } else { columns };
        self.query.check(rows, hidden, "the query projection")?;
        self.key.check(few, hidden, "the key projection")?;
        self.value.check(few, hidden, "the value projection")?;
        self.output.check(hidden, columns, "the output projection")?;
        for (norm, rows) in [(&self.query_norm, columns), (&self.key_norm, few)] {
            let fits = |len| len == width || len == rows;
            require(norm.is_none_or(|norm| fits(norm.weight.len())), || {
                format!("a norm of heads must have {width} or {rows} weights")
            })?;
        }
        let sinks = self.sinks.is_none_or(|sinks| sinks.len() == columns / width);
        require(sinks, || {
            format!(
                "the number of sinks must be that of the {} heads",
                columns / width
            )
        })
    }

    pub(super) fn check_past(&self, past: &Past) -> Result<()> {
        past.check(self.groups(), [self.width; 2])
    }
}

impl Step<'_> {
    /// The token's heads, from its products with the matrices.
    fn rotated(&self, rotation: &Rotation) -> Heads {
        let weights = self.weights;
        let product = |index: usize, linear: &Linear| {
            let mut sums = self.inputs.values(index).to_vec();
            linear.add_bias(&mut sums);
            sums
        };
        let (mut queries, gates) = match weights.gated {
            true => unzipped(&product(0, &weights.query), weights.width),
            false => (product(0, &weights.query), Vec::new()),
        };
        let (mut keys, values) = (product(1, &weights.key), product(2, &weights.value));
        for (norm, heads) in [
            (&weights.query_norm, &mut queries),
            (&weights.key_norm, &mut keys),
        ] {
            if let Some(norm) = norm {
                norm.apply(self.isa, heads);
            }
            rotation.apply(heads, weights.width, 0);
        }
        Heads {
            queries,
            gates,
            keys: Own::new(&self.past.keys, keys, weights.width),
            values: Own::new(&self.past.values, values, weights.width),
        }
    }

    /// The outputs of the heads, heads x width, after gates.
    fn outputs(&self, gates: &[f32]) -> Vec<f32> {
        let mut outputs = vec![0.0; self.weights.output.weights.shape().columns];
        let mut sinks = vec![0.0; self.weights.heads()];
        if let Some(values) = self.weights.sinks {
            values.widen(0, &mut sinks);
        }
        for (head, output) in outputs.chunks_exact_mut(self.weights.width).enumerate() {
            self.softmax
                .read(head, self.weights.sinks.map(|_| sinks[head]), output);
        }
        let gated = outputs.iter_mut().zip(gates);
        gated.for_each(|(output, &gate)| *output *= sigmoid(gate));
        outputs
    }
}

impl Mixing for Step<'_> {
    fn prefetch(&self) -> &Prefetch<'_> {
        &self.prefetch
    }

    fn run<'s>(
        &'s self,
        thread: &mut Thread<'_, 's>,
        x: &[f32],
        rotation: &Rotation,
        next: &'s Prefetch<'s>,
    ) {
        self.inputs
            .multiply(thread, Activations::F32(x), Some(&self.output.prefetch));
        let heads = thread.once(&self.heads, || self.rotated(rotation));
        let (groups, width) = (self.weights.groups(), self.weights.width);
        let rows = |past, own| Rows { past, own };
        let reading = Reading {
            queries: &heads.queries,
            keys: &[rows(self.past.keys.read(groups, width), &heads.keys.rounded)],
            values: rows(self.past.values.read(groups, width), &heads.values.rounded),
            scale: self.weights.scale,
        };
        thread.phase(self.softmax.units(), |unit| {
            self.softmax.compute(self.isa, unit, reading);
        });
        let mixed = thread.once(&self.mixed, || self.outputs(&heads.gates));
        self.output.multiply(thread, mixed, next);
    }

    fn output(&self) -> &Output<'_> {
        &self.output
    }

    fn finish(mut self: Box<Self>) {
        let heads = self.heads.into_inner().expect("the region has ended");
        self.past.push(self.weights.groups(), &heads.keys, &heads.values);
    }
}

/// Separates interleaved values into runs of `width`.
fn unzipped(values: &[f32], width: usize) -> (Vec<f32>, Vec<f32>) {
    let every = |first: usize| {
        let runs = values.chunks_exact(width).skip(first).step_by(2);
        runs.flatten().copied().collect()
    };
    (every(0), every(1))
}
