//! A whole layer of gated experts in one call: y = sum over a token's experts of weight * down(silu(gate x) * up x).
//!
//! Activations are brought into the kernels' form once a token (twice where gate and up differ in group size), gate and
//! up share a parallel region, and nothing returns to Python between the projections.

use super::drive::{Engine, Task};
use super::{Mode, invalid};
use crate::Result;
use crate::gemm::ternary::Activations;
use crate::groupwise::View;
use crate::simd::Isa;

/// The projections of all experts of a layer: gate and up are E x I x H, down is E x H x I.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'a> {
    /// Gate projections.
    pub gate: View<'a>,
    /// Up projections.
    pub up: View<'a>,
    /// Down projections.
    pub down: View<'a>,
}

/// Which experts a token goes through: `top_k` for each.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// Experts, tokens x top_k; a number that is no expert's is skipped.
    pub experts: &'a [i64],
    /// What each expert's output counts, tokens x top_k.
    pub weights: &'a [f32],
    /// Experts of a token.
    pub top_k: usize,
}

impl Layer<'_> {
    /// Computes the layer: `x` and `y` are T x H. The terms of a token are added in the order of its experts' list.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): sizes do not match, or the processor lacks the instruction set.
    pub fn forward<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        routing: Routing,
        y: &mut [f32],
        mode: Mode,
        isa: Isa,
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        let x = x.into();
        self.check(&x, &routing, y)?;
        self.run(x, routing, y, Engine::new(mode, isa, pool)?);
        Ok(())
    }

    pub(super) fn run(&self, x: Activations, routing: Routing, y: &mut [f32], engine: Engine) {
        let shape = self.gate.layout().shape();
        let sorted = Sorted::new(&routing, shape.experts);
        let (tasks, count) = (&sorted.tasks[..], sorted.list.len());
        let shared = self.gate.layout().spec().group == self.up.layout().spec().group;
        let first = match shared {
            true => engine,
            false => engine.without_matrix(),
        };
        let gate_x = first.prepare(&self.gate, tasks, x, &sorted.list);
        let up_x = (!shared).then(|| first.prepare(&self.up, tasks, x, &sorted.list));
        let mut hidden = vec![0.0; count * shape.rows];
        let inputs = [&gate_x, up_x.as_ref().unwrap_or(&gate_x)];
        first.gated([&self.gate, &self.up], tasks, inputs, &mut hidden);
        let all: Vec<usize> = (0..count).collect();
        let down_x = engine.prepare(&self.down, tasks, (&hidden[..]).into(), &all);
        let mut outputs = vec![0.0; count * shape.columns];
        engine.products(&self.down, tasks, &down_x, &mut outputs);
        weigh(&engine, &sorted, &routing, &outputs, y);
    }

    fn check(&self, x: &Activations, routing: &Routing, y: &[f32]) -> Result<()> {
        let [gate, up, down] = [self.gate, self.up, self.down].map(|view| view.layout().shape());
        let sizes = |experts, rows, columns| (experts, rows, columns);
        let hidden = sizes(gate.experts, gate.rows, gate.columns);
        let fits = hidden == sizes(up.experts, up.rows, up.columns)
            && hidden == sizes(down.experts, down.columns, down.rows);
        if !fits {
            return invalid(format!(
                "gate, up and down do not fit: {gate:?}, {up:?}, {down:?}"
            ));
        }
        let tokens = routing.experts.len() / routing.top_k.max(1);
        let fits = tokens * routing.top_k == routing.experts.len()
            && routing.weights.len() == routing.experts.len()
            && tokens.checked_mul(gate.columns) == Some(x.len())
            && y.len() == x.len();
        match fits {
            true => Ok(()),
            false => invalid(format!(
                "{} activations, {} outputs, {} experts, {} weights, {} experts a token",
                x.len(),
                y.len(),
                routing.experts.len(),
                routing.weights.len(),
                routing.top_k
            )),
        }
    }
}

/// The pairs of a token and an expert, in the order of the experts.
struct Sorted {
    tasks: Vec<Task>,
    /// The token of each place.
    list: Vec<usize>,
    /// The place of each pair of the routing; none for a skipped one.
    places: Vec<Option<usize>>,
}

impl Sorted {
    fn new(routing: &Routing, experts: usize) -> Sorted {
        let expert = |pair: usize| {
            usize::try_from(routing.experts[pair])
                .ok()
                .filter(|&e| e < experts)
        };
        let mut order: Vec<usize> = (0..routing.experts.len())
            .filter(|&pair| expert(pair).is_some())
            .collect();
        order.sort_by_key(|&pair| expert(pair));
        let mut tasks: Vec<Task> = Vec::new();
        let mut places = vec![None; routing.experts.len()];
        for (place, &pair) in order.iter().enumerate() {
            places[pair] = Some(place);
            let Some(expert) = expert(pair) else { continue };
            match tasks.last_mut() {
                Some(task) if task.expert == expert => task.places.end = place + 1,
                _ => tasks.push(Task {
                    expert,
                    places: place..place + 1,
                }),
            }
        }
        Sorted {
            tasks,
            list: order.iter().map(|pair| pair / routing.top_k).collect(),
            places,
        }
    }
}

/// Adds up each token's outputs.
fn weigh(engine: &Engine, sorted: &Sorted, routing: &Routing, outputs: &[f32], y: &mut [f32]) {
    let columns = y.len() / (routing.experts.len() / routing.top_k.max(1)).max(1);
    let sum = |(token, y): (usize, &mut [f32])| {
        y.fill(0.0);
        for pair in token * routing.top_k..(token + 1) * routing.top_k {
            let Some(place) = sorted.places[pair] else {
                continue;
            };
            let weight = routing.weights[pair];
            let from = &outputs[place * columns..][..columns];
            y.iter_mut().zip(from).for_each(|(y, value)| *y += weight * value);
        }
    };
    use rayon::prelude::*;
    match outputs.len() < 1 << 18 {
        true => y.chunks_mut(columns.max(1)).enumerate().for_each(sum),
        false => engine
            .pool
            .install(|| y.par_chunks_mut(columns.max(1)).enumerate().for_each(sum)),
    }
}
