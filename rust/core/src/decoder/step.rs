//! One token's way through a decoder.

use std::sync::OnceLock;

use rayon::ThreadPool;

use super::attention::{Heads, Mixing};
use super::feed_forward::Routed;
use super::norm::Norm;
use super::past::Past;
use super::rotary::Turn;
use super::{Block, Decoder, require};
use crate::Result;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::{self, Thread, Threads};
use crate::gemm::layer::{Job, Projection};
use crate::simd::Isa;
use crate::types::Activations;

/// What goes from half a layer to the next.
struct Hidden {
    /// The sum of all that has been added.
    sum: Vec<f32>,
    /// The next norm of it.
    normed: Vec<f32>,
}

/// A layer at a step.
struct State<'a> {
    block: &'a Block<'a>,
    past: &'a Past<'a>,
    inputs: Matrices<'a>,
    /// The memory that is read first by the inputs, the output and the router.
    prefetches: [Prefetch<'a>; 3],
    heads: OnceLock<Heads>,
    mixing: Mixing<'a>,
    mixed: OnceLock<Vec<f32>>,
    output: Matrices<'a>,
    middle: OnceLock<Hidden>,
    routed: Routed<'a>,
    end: OnceLock<Hidden>,
}

impl Hidden {
    fn new(isa: Isa, sum: Vec<f32>, norm: &Norm) -> Hidden {
        let mut normed = sum.clone();
        norm.apply(isa, &mut normed);
        Hidden { sum, normed }
    }
}

impl Decoder<'_> {
    /// Takes a token through all layers: its hidden state `x` becomes `y`, normed, and each layer's cache gets its keys
    /// and values. Tokens see all tokens of the caches.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): sizes do not match, a cache is full, or the processor lacks the
    /// instruction set. Nothing has been changed then.
    pub fn step(
        &self,
        x: Activations,
        position: usize,
        past: &mut [Past],
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<()> {
        let isa = isa.require()?;
        self.check(x.len())?;
        require(y.len() == x.len() && past.len() == self.blocks.len(), || {
            let (blocks, caches) = (self.blocks.len(), past.len());
            format!(
                "{} outputs of {}, {caches} caches of {blocks} layers",
                y.len(),
                x.len()
            )
        })?;
        for (block, past) in self.blocks.iter().zip(&*past) {
            past.check(block.attention.groups(), block.attention.width)?;
        }
        let heads = self.run(x, position, past, y, isa, pool);
        for ((past, block), heads) in past.iter_mut().zip(&self.blocks).zip(heads) {
            past.push(block.attention.width, &heads.keys, &heads.values);
        }
        Ok(())
    }

    /// Computes a step; the heads of all layers.
    fn run(
        &self,
        x: Activations,
        position: usize,
        past: &[Past],
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Vec<Heads> {
        let threads = pool.current_num_threads();
        let layers = self.blocks.iter().zip(past);
        let states: Vec<State> = layers
            .map(|(block, past)| State::new(block, past, threads, isa))
            .collect();
        let (turn, start) = (self.rotary.at(position), OnceLock::new());
        region::run(pool, Threads::Awake, |thread| {
            thread.prefetch(states.first().map(State::prefetch));
            let mut hidden = thread.once(&start, || {
                let mut sum = vec![0.0; x.len()];
                x.widen(0, &mut sum);
                Hidden::new(isa, sum, self.norm_before(0))
            });
            for (layer, state) in states.iter().enumerate() {
                let next = (
                    self.norm_before(layer + 1),
                    states.get(layer + 1).map(State::prefetch),
                );
                hidden = state.run(thread, isa, hidden, &turn, next);
            }
        });
        let last = states.last().map_or(&start, |state| &state.end);
        y.copy_from_slice(&last.get().expect("the region has ended").normed);
        let heads = states.into_iter().map(|state| state.heads.into_inner());
        heads.map(|heads| heads.expect("the region has ended")).collect()
    }

    /// The norm that a layer starts with, or that behind the last.
    fn norm_before(&self, layer: usize) -> &Norm<'_> {
        self.blocks
            .get(layer)
            .map_or(&self.norm, |block| &block.attention.norm)
    }
}

impl<'a> State<'a> {
    fn new(block: &'a Block<'a>, past: &'a Past<'a>, threads: usize, isa: Isa) -> State<'a> {
        let attention = &block.attention;
        let inputs: [&dyn Projection; 3] = [
            &*attention.query.weights,
            &*attention.key.weights,
            &*attention.value.weights,
        ];
        let job = || Job::of_offsets(&[0, 1]);
        let inputs = Matrices::new(&inputs, job(), threads);
        let output = Matrices::new(&[&*attention.output.weights], job(), threads);
        let routed = Routed::new(&block.feed_forward, threads, isa);
        State {
            block,
            past,
            prefetches: [
                inputs.prefetch(threads),
                output.prefetch(threads),
                routed.prefetch(),
            ],
            inputs,
            heads: OnceLock::new(),
            mixing: attention.mixing(past),
            mixed: OnceLock::new(),
            output,
            middle: OnceLock::new(),
            routed,
            end: OnceLock::new(),
        }
    }

    /// The memory that is read first.
    fn prefetch(&self) -> &Prefetch<'a> {
        &self.prefetches[0]
    }

    /// Goes through the layer, on a thread of a region; `next` is the norm behind it, and the memory that is read then.
    fn run<'s>(
        &'s self,
        thread: &mut Thread<'_, 's>,
        isa: Isa,
        hidden: &Hidden,
        turn: &Turn,
        next: (&Norm, Option<&'s Prefetch<'s>>),
    ) -> &'s Hidden {
        let (attention, feed_forward) = (&self.block.attention, &self.block.feed_forward);
        self.inputs.multiply(
            thread,
            Activations::F32(&hidden.normed),
            Some(&self.prefetches[1]),
        );
        let heads = thread.once(&self.heads, || {
            let products = [0, 1, 2].map(|index| self.inputs.values(index));
            attention.heads(isa, products, turn, self.past)
        });
        thread.phase(self.mixing.units(), |unit| self.mixing.compute(isa, unit, heads));
        let mixed = thread.once(&self.mixed, || self.mixing.outputs());
        self.output
            .multiply(thread, Activations::F32(mixed), Some(&self.prefetches[2]));
        let hidden = thread.once(&self.middle, || {
            let mut sum = self.output.values(0).to_vec();
            attention.output.add_bias(&mut sum);
            sum.iter_mut()
                .zip(&hidden.sum)
                .for_each(|(sum, before)| *sum += before);
            Hidden::new(isa, sum, &feed_forward.norm)
        });
        self.routed.run(thread, &hidden.normed, next.1);
        thread.once(&self.end, || {
            let mut sum = hidden.sum.clone();
            self.routed.add(&mut sum);
            Hidden::new(isa, sum, next.0)
        })
    }
}
