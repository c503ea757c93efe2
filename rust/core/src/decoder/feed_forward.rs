//! The second half of a layer: routing and experts.

use std::sync::OnceLock;

use super::router::Choice;
use super::{Experts, FeedForward, require};
use crate::Result;
use crate::gemm::layer::experts::Pass;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::Thread;
use crate::gemm::layer::{Job, Routing};
use crate::simd::Isa;
use crate::types::Activations;

/// The experts of a layer in a step.
pub(super) struct Routed<'a> {
    weights: &'a FeedForward<'a>,
    /// The router and the gate of the shared expert, if there are any.
    scores: Matrices<'a>,
    experts: OnceLock<Pass<'a>>,
    shared: OnceLock<Pass<'a>>,
    threads: usize,
    isa: Isa,
}

impl<'a> Routed<'a> {
    pub fn new(weights: &'a FeedForward<'a>, threads: usize, isa: Isa) -> Routed<'a> {
        let router = weights.router.as_ref().map(|router| &*router.weights);
        let gate = weights.shared.as_ref().and_then(|shared| shared.gate.as_deref());
        let matrices: Vec<_> = router.into_iter().chain(gate).collect();
        Routed {
            weights,
            scores: Matrices::new(&matrices, Job::of_offsets(&[0, 1]), threads),
            experts: OnceLock::new(),
            shared: OnceLock::new(),
            threads,
            isa,
        }
    }

    /// The memory that is read first.
    pub fn prefetch(&self) -> Prefetch<'a> {
        self.scores.prefetch(self.threads)
    }

    /// Computes the experts of `x` on a thread of a region. The memory of `next` is read afterwards.
    pub fn run<'s>(&'s self, thread: &mut Thread<'_, 's>, x: &[f32], next: Option<&'s Prefetch<'s>>) {
        self.scores.multiply(thread, Activations::F32(x), None);
        let pass = thread.once(&self.experts, || self.pass(&self.weights.experts, self.choice()));
        pass.run(thread, Activations::F32(x), next);
        if let Some(shared) = &self.weights.shared {
            let pass = thread.once(&self.shared, || self.pass(&shared.experts, self.share()));
            pass.run(thread, Activations::F32(x), next);
        }
    }

    /// Adds the experts' outputs to `sum`.
    pub fn add(&self, sum: &mut [f32]) {
        for pass in [&self.experts, &self.shared]
            .into_iter()
            .filter_map(OnceLock::get)
        {
            pass.add(0, sum);
        }
    }

    fn pass(&self, experts: &'a Experts<'a>, choice: Choice) -> Pass<'a> {
        let routing = Routing {
            experts: &choice.experts,
            weights: &choice.weights,
            top_k: choice.experts.len(),
        };
        Pass::new(experts.layer(), &routing, 1, self.threads, self.isa)
    }

    fn choice(&self) -> Choice {
        match &self.weights.router {
            Some(router) => router.choose(self.scores.values(0)),
            None => Choice::only(1.0),
        }
    }

    /// The shared expert and its weight.
    fn share(&self) -> Choice {
        let gated = self
            .weights
            .shared
            .as_ref()
            .is_some_and(|shared| shared.gate.is_some());
        let index = usize::from(self.weights.router.is_some());
        Choice::only(match gated {
            true => 1.0 / (1.0 + (-self.scores.values(index)[0]).exp()),
            false => 1.0,
        })
    }
}

impl Choice {
    /// The first expert.
    fn only(weight: f32) -> Choice {
        Choice {
            experts: vec![0],
            weights: vec![weight],
        }
    }
}

impl FeedForward<'_> {
    pub(super) fn check(&self, hidden: usize) -> Result<()> {
        self.norm.check(hidden, "the norm before the experts")?;
        let experts = self
            .router
            .as_ref()
            .map_or(1, |router| router.weights.shape().rows);
        self.experts.check(experts, hidden)?;
        if let Some(router) = &self.router {
            router.check(hidden)?;
        }
        if let Some(shared) = &self.shared {
            shared.experts.check(1, hidden)?;
            let gate = shared.gate.as_ref().map(|gate| gate.shape());
            let fits =
                |shape: crate::types::Shape| (shape.experts, shape.rows, shape.columns) == (1, 1, hidden);
            require(gate.is_none_or(fits), || {
                format!("a shared expert's gate has the shape {gate:?}")
            })?;
        }
        Ok(())
    }
}

impl Experts<'_> {
    fn check(&self, experts: usize, hidden: usize) -> Result<()> {
        self.layer().check()?;
        let shape = self.gate.shape();
        let fits = (shape.experts, shape.columns) == (experts, hidden) && shape.rows > 0;
        require(fits, || {
            format!("experts have the shape {shape:?} instead of {experts} experts with {hidden} columns")
        })
    }
}
