//! One token's pass through a decoder.

use std::sync::OnceLock;

use rayon::ThreadPool;

use super::feed_forward::Routed;
use super::norm::Norm;
use super::output::Output;
use super::past::Past;
use super::rotary::Rotation;
use super::{Block, Decoder, Mixer, require};
use crate::Result;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::{self, Thread, Threads};
use crate::simd::Isa;
use crate::types::Activations;

/// The hidden state between halves of layers.
struct Hidden {
    /// The residual stream.
    sum: Vec<f32>,
    /// Its value after the next norm.
    normed: Vec<f32>,
}

/// A mixer in a step.
pub(super) trait Mixing: Sync {
    /// The memory that is read first.
    fn prefetch(&self) -> &Prefetch<'_>;

    /// Computes the mixer for `x` on a thread of a region. The memory of `next` is read afterwards.
    fn run<'s>(&'s self, thread: &mut Thread<'_, 's>, x: &[f32], rotation: &Rotation, next: &'s Prefetch<'s>);

    /// The output projection, which [`Mixing::run`] has computed.
    fn output(&self) -> &Output<'_>;

    /// Appends the token to the cache.
    fn finish(self: Box<Self>);
}

/// A layer in a step.
struct State<'a> {
    block: &'a Block<'a>,
    mixing: Box<dyn Mixing + 'a>,
    middle: OnceLock<Hidden>,
    routed: Routed<'a>,
    /// The memory that the experts read first.
    prefetch: Prefetch<'a>,
    end: OnceLock<Hidden>,
}

impl Hidden {
    fn new(isa: Isa, sum: Vec<f32>, norm: &Norm) -> Hidden {
        let mut normed = sum.clone();
        norm.apply(isa, &mut normed);
        Hidden { sum, normed }
    }
}

impl Mixer<'_> {
    fn check(&self, past: &Past) -> Result<()> {
        match self {
            Mixer::Attention(attention) => attention.check_past(past),
            Mixer::Latent(latent) => latent.check_past(past),
            Mixer::Delta(delta) => delta.check_past(past),
        }
    }

    fn mixing<'a>(&'a self, past: Past<'a>, threads: usize, isa: Isa) -> Box<dyn Mixing + 'a> {
        match self {
            Mixer::Attention(attention) => attention.mixing(past, threads, isa),
            Mixer::Latent(latent) => latent.mixing(past, threads, isa),
            Mixer::Delta(delta) => delta.mixing(past, threads, isa),
        }
    }
}

impl Decoder<'_> {
    /// Passes a token through all layers: `x` is its hidden state, `y` takes the normed output, and each layer's
    /// cache is extended by its keys and values. The token sees all tokens of the caches from the first visible one
    /// on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if sizes do not match, a cache is full, or the processor lacks the
    /// instruction set. Nothing has been changed in this case.
    pub fn step(
        &self,
        x: Activations,
        position: usize,
        past: &mut [Past],
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<()> {
        let isa = isa.vectors();
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
            block.mixer.check(past)?;
        }
        self.run(x, position, past, y, isa, pool);
        past.iter_mut().for_each(|past| past.length += 1);
        Ok(())
    }

    /// Computes a step; sizes must have been checked.
    fn run(
        &self,
        x: Activations,
        position: usize,
        past: &mut [Past],
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) {
        let threads = pool.current_num_threads();
        let layers = self.blocks.iter().zip(past);
        let states: Vec<State> = layers
            .map(|(block, past)| State::new(block, past.reborrow(), threads, isa))
            .collect();
        let (rotation, start) = (self.rotary.at(position), OnceLock::new());
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
                hidden = state.run(thread, isa, hidden, &rotation, next);
            }
        });
        let last = states.last().map_or(&start, |state| &state.end);
        y.copy_from_slice(&last.get().expect("the region has ended").normed);
        states.into_iter().for_each(|state| state.mixing.finish());
    }

    /// The norm before a layer, or the final norm after the last one.
    fn norm_before(&self, layer: usize) -> &Norm<'_> {
        self.blocks.get(layer).map_or(&self.norm, |block| &block.norm)
    }
}

impl<'a> State<'a> {
    fn new(block: &'a Block<'a>, past: Past<'a>, threads: usize, isa: Isa) -> State<'a> {
        let routed = Routed::new(&block.feed_forward, threads, isa);
        State {
            block,
            mixing: block.mixer.mixing(past, threads, isa),
            middle: OnceLock::new(),
            prefetch: routed.prefetch(),
            routed,
            end: OnceLock::new(),
        }
    }

    /// The memory that is read first.
    fn prefetch(&self) -> &Prefetch<'_> {
        self.mixing.prefetch()
    }

    /// Computes the layer on a thread of a region; `next` is the norm after it, and the memory that is read next.
    fn run<'s>(
        &'s self,
        thread: &mut Thread<'_, 's>,
        isa: Isa,
        hidden: &Hidden,
        rotation: &Rotation,
        next: (&Norm, Option<&'s Prefetch<'s>>),
    ) -> &'s Hidden {
        self.mixing.run(thread, &hidden.normed, rotation, &self.prefetch);
        let hidden = thread.once(&self.middle, || {
            let mut sum = hidden.sum.clone();
            self.mixing.output().add(&mut sum);
            Hidden::new(isa, sum, &self.block.feed_forward.norm)
        });
        self.routed.run(thread, &hidden.normed, next.1);
        thread.once(&self.end, || {
            let mut sum = hidden.sum.clone();
            self.routed.add(&mut sum);
            Hidden::new(isa, sum, next.0)
        })
    }
}
