//! A layer of gated experts: y = sum over a token's experts of weight * down(silu(gate x) * up x), or with another
//! [`Gate`] and with biases after the products.

use std::sync::Arc;

use rayon::ThreadPool;

use super::activation::Gate;
use super::bands::Bands;
use super::cut::{self, Cut};
use super::output::Output;
use super::prefetch::{self, Prefetch};
use super::projection::{Products, Projection};
use super::region::{self, Thread, Threads};
use super::routing::{Job, Routing, Sorted};
use crate::simd::Isa;
use crate::types::Activations;
use crate::{Error, Result};

/// The projections of all experts of a layer: gate and up are E x I x H, down is E x H x I.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Gate projections.
    pub gate: &'a dyn Projection,
    /// Up projections.
    pub up: &'a dyn Projection,
    /// Down projections.
    pub down: &'a dyn Projection,
    /// The gate, which combines the products of gate and up.
    pub act: Gate,
    /// The biases of the products.
    pub biases: Option<Biases<'a>>,
}

/// The biases of all experts of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Biases<'a> {
    /// The biases of gate and up, interleaved, E x 2 I.
    pub gate_up: Activations<'a>,
    /// The biases of down, E x H.
    pub down: Activations<'a>,
}

impl Biases<'_> {
    /// Adds the biases of `count` rows, starting at row `first` counted over all experts, to products of gate and up,
    /// places x rows each.
    fn add_to_inputs(&self, first: usize, count: usize, gate: &mut [f32], up: &mut [f32]) {
        let mut pairs = vec![0.0; 2 * count];
        self.gate_up.widen(2 * first, &mut pairs);
        for (gate, up) in gate.chunks_exact_mut(count).zip(up.chunks_exact_mut(count)) {
            for (row, pair) in pairs.chunks_exact(2).enumerate() {
                gate[row] += pair[0];
                up[row] += pair[1];
            }
        }
    }

    /// Adds the biases of `count` rows, starting at row `first` counted over all experts, to products of down, places
    /// x rows.
    fn add_to_outputs(&self, first: usize, count: usize, outputs: &mut [f32]) {
        let mut bias = vec![0.0; count];
        self.down.widen(first, &mut bias);
        for outputs in outputs.chunks_exact_mut(count) {
            outputs.iter_mut().zip(&bias).for_each(|(out, bias)| *out += bias);
        }
    }
}

impl<'a> Layer<'a> {
    /// A layer with a SiLU gate and without biases.
    pub fn new(gate: &'a dyn Projection, up: &'a dyn Projection, down: &'a dyn Projection) -> Layer<'a> {
        Layer {
            gate,
            up,
            down,
            act: Gate::Silu,
            biases: None,
        }
    }
}

impl Layer<'_> {
    /// Computes the layer: `x` and `y` are T x H. The terms of a token are added in the order of its experts' list.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if sizes do not match or the processor lacks the instruction set.
    pub fn forward<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        routing: Routing,
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<()> {
        let (x, vectors) = (x.into(), isa.vectors());
        self.check()?;
        routing.check(self.gate.shape().columns, &x, y)?;
        if x.len() == 0 || self.gate.shape().rows == 0 {
            y.fill(0.0);
            return Ok(());
        }
        self.run(x, routing, y, vectors, pool);
        Ok(())
    }

    fn run(&self, x: Activations, routing: Routing, y: &mut [f32], isa: Isa, pool: &ThreadPool) {
        let columns = self.gate.shape().columns;
        let tokens = x.len() / columns;
        let pass = Pass::new(*self, &routing, tokens, pool.current_num_threads(), isa);
        let threads = Threads::of(cut::alone(&[self.gate, self.up, self.down], &pass.job), tokens);
        let y = Output::new(y, columns, pass.bands.as_ref().map_or(tokens, Bands::units));
        region::run(pool, threads, |thread| {
            pass.run(thread, x, None);
            if let Some(bands) = &pass.bands {
                return bands.fill(thread, &*pass.down, &pass.own, &pass.terms, &y);
            }
            let mut sum = vec![0.0; columns];
            thread.phase(tokens, |token| {
                sum.fill(0.0);
                pass.add(token, &mut sum);
                // SAFETY: units have different tokens.
                unsafe { y.fill(token, token..token + 1, 0..columns, &sum) }
            });
        });
    }

    /// Checks that the shapes of the projections and biases match.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if they do not.
    pub(crate) fn check(&self) -> Result<()> {
        let [gate, up, down] = [self.gate, self.up, self.down].map(|projection| projection.shape());
        let sizes = |experts, rows, columns| (experts, rows, columns);
        let hidden = sizes(gate.experts, gate.rows, gate.columns);
        let biased = self.biases.is_none_or(|biases| {
            biases.gate_up.len() == 2 * up.experts * up.rows && biases.down.len() == down.experts * down.rows
        });
        let fits = hidden == sizes(up.experts, up.rows, up.columns)
            && hidden == sizes(down.experts, down.columns, down.rows)
            && biased;
        match fits {
            true => Ok(()),
            false => invalid(format!(
                "the shapes of gate, up, down or their biases do not fit: {gate:?}, {up:?}, {down:?}"
            )),
        }
    }
}

/// A layer and the tokens of a call, for a single computation.
pub(crate) struct Pass<'a> {
    gate: Box<dyn Products + 'a>,
    up: Box<dyn Products + 'a>,
    down: Box<dyn Products + 'a>,
    /// The job of gate and up.
    job: Arc<Job>,
    /// The job of down: every place has its own hidden activations.
    own: Arc<Job>,
    cuts: [Cut; 2],
    /// The memory that each of the two jobs reads first.
    prefetches: [Prefetch<'a>; 2],
    /// The bands of down, if the outputs are summed immediately because there are many.
    bands: Option<Bands>,
    hidden: Output<'a>,
    /// The outputs of all places; empty if they are summed immediately.
    outputs: Output<'a>,
    /// For each token, the places and weights of its experts.
    terms: Vec<Vec<(usize, f32)>>,
    act: Gate,
    biases: Option<Biases<'a>>,
    isa: Isa,
}

impl<'a> Pass<'a> {
    /// Creates a pass; sizes must have been checked.
    pub fn new(layer: Layer<'a>, routing: &Routing, tokens: usize, threads: usize, isa: Isa) -> Pass<'a> {
        let shape = layer.gate.shape();
        let Sorted { job, places } = Sorted::new(routing, tokens, shape.experts);
        let own = Arc::new(Job::of_tasks(job.tasks.clone()));
        let job = Arc::new(job);
        let gate = layer.gate.products(&job);
        let up = layer.up.products(&job);
        let cuts = [
            Cut::new(&[layer.gate, layer.up], &job, threads),
            Cut::new(&[layer.down], &own, threads),
        ];
        let terms = places
            .chunks(routing.top_k.max(1))
            .zip(routing.weights.chunks(routing.top_k.max(1)));
        let placed = |(places, weights): (&[Option<usize>], &[f32])| {
            let pairs = places.iter().zip(weights);
            pairs
                .filter_map(|(&place, &weight)| Some((place?, weight)))
                .collect()
        };
        let prefetches = [
            Prefetch::new(cuts[0].units(&job), threads, |unit| {
                prefetch::memory(&[layer.gate, layer.up], &job, &cuts[0], unit)
            }),
            Prefetch::new(cuts[1].units(&own), threads, |unit| {
                prefetch::memory(&[layer.down], &own, &cuts[1], unit)
            }),
        ];
        // Bands do not support biases.
        let bands = Bands::new(layer.down, &own, threads).filter(|_| layer.biases.is_none());
        let outputs = match bands {
            Some(_) => Output::owned(0, 0, 0),
            None => Output::owned(job.list.len(), shape.columns, cuts[1].units(&own)),
        };
        Pass {
            down: layer.down.products(&own),
            hidden: Output::owned(job.list.len(), shape.rows, cuts[0].units(&job)),
            outputs,
            bands,
            terms: terms.map(placed).collect(),
            gate,
            up,
            job,
            own,
            cuts,
            prefetches,
            act: layer.act,
            biases: layer.biases,
            isa,
        }
    }

    /// Computes the experts' outputs (or, if they are summed immediately, their inputs) on a thread of a region: `x`
    /// is T x H. The memory of `next` is read afterwards.
    pub fn run<'s>(&'s self, thread: &mut Thread<'_, 's>, x: Activations, next: Option<&'s Prefetch<'s>>) {
        thread.prefetch(Some(&self.prefetches[0]));
        for stage in 0..2 {
            let [gate, up] = [&self.gate, &self.up].map(|products| products.stages()[stage]);
            thread.phase(gate + up, |unit| match unit.checked_sub(gate) {
                None => self.gate.prepare(stage, unit, x),
                Some(unit) => self.up.prepare(stage, unit, x),
            });
        }
        thread.prefetch(Some(&self.prefetches[1]));
        self.gates(thread);
        for stage in 0..2 {
            thread.phase(self.down.stages()[stage], |unit| {
                self.down
                    .prepare(stage, unit, Activations::F32(self.hidden.values()));
            });
        }
        thread.prefetch(next);
        if self.bands.is_none() {
            self.downs(thread);
        }
    }

    /// The phase of gate and up: the gated products become hidden activations.
    fn gates(&self, thread: &mut Thread) {
        let (mut gate, mut up) = (self.gate.worker(), self.up.worker());
        let (mut values, mut factors) = (Vec::new(), Vec::new());
        thread.phase(self.cuts[0].units(&self.job), |unit| {
            let (task, rows) = self.cuts[0].at(unit);
            let places = self.job.tasks[task].places.clone();
            values.resize(places.len() * rows.len(), 0.0);
            factors.resize(values.len(), 0.0);
            gate.multiply(task, rows.clone(), &mut values);
            up.multiply(task, rows.clone(), &mut factors);
            if let Some(biases) = self.biases {
                let first = self.job.tasks[task].expert * self.hidden.rows() + rows.start;
                biases.add_to_inputs(first, rows.len(), &mut values, &mut factors);
            }
            self.act.apply(self.isa, &mut values, &factors);
            // SAFETY: a place belongs to one task, and the units of a task have disjoint rows.
            unsafe { self.hidden.fill(unit, places, rows, &values) }
        });
    }

    /// The phase of down.
    fn downs(&self, thread: &mut Thread) {
        let (mut down, mut values) = (self.down.worker(), Vec::new());
        thread.phase(self.cuts[1].units(&self.own), |unit| {
            let (task, rows) = self.cuts[1].at(unit);
            let places = self.own.tasks[task].places.clone();
            values.resize(places.len() * rows.len(), 0.0);
            down.multiply(task, rows.clone(), &mut values);
            if let Some(biases) = self.biases {
                let first = self.own.tasks[task].expert * self.outputs.rows() + rows.start;
                biases.add_to_outputs(first, rows.len(), &mut values);
            }
            // SAFETY: a place belongs to one task, and the units of a task have disjoint rows.
            unsafe { self.outputs.fill(unit, places, rows, &values) }
        });
    }

    /// Adds a token's weighted outputs to `sum`, after they have been computed.
    pub fn add(&self, token: usize, sum: &mut [f32]) {
        for &(place, weight) in &self.terms[token] {
            let from = &self.outputs.values()[place * sum.len()..][..sum.len()];
            sum.iter_mut()
                .zip(from)
                .for_each(|(sum, value)| *sum += weight * value);
        }
    }
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
