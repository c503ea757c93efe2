//! The gated delta rule after a short convolution (arXiv 2412.06464), for the linear attention layers of Qwen3-Next
//! and Qwen3.5.
//!
//! Each value head keeps a state S, keys x values, instead of all tokens. With rows q, k and v of a token, S becomes
//! d S + k^T b (v - k d S), and the output is q S. The decay d = exp(-exp(a) softplus(s + bias)) and the rate b =
//! sigmoid(t) also depend on the token. Queries, keys and values first pass through a convolution over the last
//! tokens.

use std::sync::{Mutex, OnceLock};

use super::norm::Norm;
use super::output::Output;
use super::past::{Lane, Past};
use super::rotary::Rotation;
use super::step::Mixing;
use super::{Linear, Weights, add, require};
use crate::Result;
use crate::gemm::dense::dot;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::Thread;
use crate::gemm::layer::{Job, Projection, sigmoid};
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// Added to the sum of squares that normalizes queries and keys to length 1.
const EPSILON: f32 = 1e-6;

/// The gated delta rule.
pub struct Delta<'a> {
    /// Queries and keys (of all key heads), values, gates, rates and decays (of all value heads): two matrices,
    /// ordered by key head (q, k, v, gate; rate, decay), or four (q k v; gate; rate; decay).
    pub inputs: Vec<Weights<'a>>,
    /// The weights of the convolution, channels x tokens; channels are queries, keys, values.
    pub convolution: Activations<'a>,
    /// The factor a of the decay, per value head.
    pub decay: Activations<'a>,
    /// The bias of the token's part s of the decay, per value head.
    pub decay_bias: Activations<'a>,
    /// The norm of a head's output.
    pub norm: Norm<'a>,
    /// The output projection, with value heads * value width columns.
    pub output: Linear<'a>,
    /// The number of key heads, which divides that of value heads.
    pub key_heads: usize,
    /// The width of a key.
    pub width: usize,
}

/// The sizes of a delta rule.
#[derive(Clone, Copy)]
struct Sizes {
    /// The number of value heads.
    heads: usize,
    /// The number of value heads that share a key.
    sharing: usize,
    /// The total width of all queries, and of all keys.
    keys: usize,
    /// The width of a key, and of a value.
    width: [usize; 2],
    /// The inputs of the convolution.
    channels: usize,
}

/// The contribution of a token to the state.
struct Token {
    /// The queries of each key head.
    queries: Vec<f32>,
    /// The keys of each key head.
    keys: Vec<f32>,
    /// The values of each value head.
    values: Vec<f32>,
    /// The gates of each value head.
    gates: Vec<f32>,
    /// For each value head, the decay of the state and the rate of its update.
    rates: Vec<[f32; 2]>,
    /// The last inputs of the convolution, including the token's.
    window: Vec<f32>,
}

/// The delta rule of a step.
struct Step<'a> {
    weights: &'a Delta<'a>,
    window: Lane<'a>,
    /// The state of each head; one unit of work changes it.
    states: Vec<Mutex<&'a mut [f32]>>,
    inputs: Matrices<'a>,
    output: Output<'a>,
    /// The memory that the inputs read first.
    prefetch: Prefetch<'a>,
    token: OnceLock<Token>,
    outputs: Vec<OnceLock<Vec<f32>>>,
    mixed: OnceLock<Vec<f32>>,
    isa: Isa,
}

impl Delta<'_> {
    fn sizes(&self) -> Sizes {
        let (heads, value) = (self.decay.len(), self.norm.weight.len());
        let keys = self.key_heads * self.width;
        Sizes {
            heads,
            sharing: heads / self.key_heads.max(1),
            keys,
            width: [self.width, value],
            channels: 2 * keys + heads * value,
        }
    }

    pub(super) fn mixing<'a>(&'a self, past: Past<'a>, threads: usize, isa: Isa) -> Box<dyn Mixing + 'a> {
        let Sizes { heads, width, .. } = self.sizes();
        let inputs: Vec<&dyn Projection> = self.inputs.iter().map(|weights| &**weights).collect();
        let inputs = Matrices::new(&inputs, Job::of_offsets(&[0, 1]), threads);
        let Lane::F32(states) = past.values else {
            unreachable!("a cache has been checked")
        };
        Box::new(Step {
            weights: self,
            window: past.keys,
            states: states
                .chunks_exact_mut(width[0] * width[1])
                .map(Mutex::new)
                .collect(),
            prefetch: inputs.prefetch(threads),
            inputs,
            output: Output::new(&self.output, threads),
            token: OnceLock::new(),
            outputs: (0..heads).map(|_| OnceLock::new()).collect(),
            mixed: OnceLock::new(),
            isa,
        })
    }

    pub(super) fn check(&self, hidden: usize) -> Result<()> {
        let Sizes {
            heads,
            sharing,
            keys,
            width: [width, value],
            channels,
        } = self.sizes();
        let rows: Vec<usize> = match self.inputs.len() {
            2 => vec![channels + heads * value, 2 * heads],
            _ => vec![channels, heads * value, heads, heads],
        };
        let shapes: Vec<_> = self.inputs.iter().map(|weights| weights.shape()).collect();
        let found = shapes
            .iter()
            .map(|shape| (shape.experts, shape.rows, shape.columns));
        let kernel = self.convolution.len() / channels.max(1);
        let fits = found.eq(rows.into_iter().map(|rows| (1, rows, hidden)))
            && keys > 0
            && width > 0
            && value > 0
            && heads == sharing * self.key_heads
            && sharing > 0
            && kernel > 0
            && self.convolution.len() == kernel * channels
            && self.decay_bias.len() == heads;
        require(fits, || {
            format!(
                "the sizes of a delta rule do not match: {} heads of {width} keys and {heads} of {value} values: \
                 {shapes:?}",
                self.key_heads
            )
        })?;
        self.output.check(hidden, heads * value, "the output projection")
    }

    pub(super) fn check_past(&self, past: &Past) -> Result<()> {
        let Sizes { heads, width, .. } = self.sizes();
        let size = heads * width[0] * width[1];
        let state = matches!(&past.values, Lane::F32(values) if values.len() == size);
        let window = past.keys.floats().map(|values| values.len());
        require(state && window == Some(self.convolution.len()), || {
            "the state of a delta rule has another size".into()
        })
    }
}

impl Step<'_> {
    /// The token's inputs of the convolution, gates, rates and decays.
    fn parts(&self) -> [Vec<f32>; 4] {
        let Sizes {
            heads,
            sharing,
            width: [width, value],
            ..
        } = self.weights.sizes();
        if self.weights.inputs.len() == 4 {
            return [0, 1, 2, 3].map(|index| self.inputs.values(index).to_vec());
        }
        let (mut parts, mut pair) = ([const { Vec::new() }; 4], [const { Vec::new() }; 2]);
        let lengths = [width, width, sharing * value, sharing * value];
        split(self.inputs.values(0), &lengths, &mut parts);
        split(self.inputs.values(1), &[sharing; 2], &mut pair);
        debug_assert_eq!(pair[0].len(), heads);
        let ([queries, keys, values, gates], [rates, decays]) = (parts, pair);
        [[queries, keys, values].concat(), gates, rates, decays]
    }

    fn token(&self) -> Token {
        let (weights, sizes) = (self.weights, self.weights.sizes());
        let [mut inputs, gates, rates, decays] = self.parts();
        inputs = self.window.rounded(&inputs, sizes.channels);
        let (mut kernel, mut window) = (
            vec![0.0; weights.convolution.len()],
            vec![0.0; weights.convolution.len()],
        );
        weights.convolution.widen(0, &mut kernel);
        let before = self.window.floats().expect("a cache has been checked");
        before.widen(0, &mut window);
        let count = kernel.len() / sizes.channels;
        let channels = kernel.chunks_exact(count).zip(window.chunks_exact_mut(count));
        for (x, (kernel, window)) in inputs.iter_mut().zip(channels) {
            window.rotate_left(1);
            window[count - 1] = *x;
            let sum: f32 = kernel.iter().zip(&*window).map(|(kernel, x)| kernel * x).sum();
            *x = sum * sigmoid(sum);
        }
        let values = inputs.split_off(2 * sizes.keys);
        let mut keys = inputs.split_off(sizes.keys);
        for (heads, factor) in [(&mut inputs, (sizes.width[0] as f32).sqrt()), (&mut keys, 1.0)] {
            for head in heads.chunks_exact_mut(sizes.width[0]) {
                shorten(self.isa, head, factor);
            }
        }
        Token {
            queries: inputs,
            keys,
            values,
            gates,
            rates: self.rates(&rates, &decays),
            window,
        }
    }

    fn rates(&self, rates: &[f32], decays: &[f32]) -> Vec<[f32; 2]> {
        let (mut decay, mut sums) = (vec![0.0; decays.len()], decays.to_vec());
        self.weights.decay.widen(0, &mut decay);
        add(self.weights.decay_bias, &mut sums);
        let softplus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
        let heads = rates.iter().zip(decay.iter().zip(sums));
        heads
            .map(|(&rate, (decay, sum))| [(-decay.exp() * softplus(sum)).exp(), sigmoid(rate)])
            .collect()
    }

    /// Computes a head's output, normed and gated; updates its state.
    fn head(&self, head: usize, token: &Token) -> Vec<f32> {
        let Sizes {
            sharing,
            width: [width, value],
            ..
        } = self.weights.sizes();
        let key = head / sharing * width..(head / sharing + 1) * width;
        let own = head * value..(head + 1) * value;
        let mut output = token.values[own.clone()].to_vec();
        let mut state = self.states[head].lock().expect("each state belongs to one unit");
        update(
            self.isa,
            &mut state,
            [&token.queries[key.clone()], &token.keys[key]],
            token.rates[head],
            &mut output,
        );
        self.weights.norm.apply(self.isa, &mut output);
        let gated = output.iter_mut().zip(&token.gates[own]);
        gated.for_each(|(output, &gate)| *output *= gate * sigmoid(gate));
        output
    }
}

/// Distributes runs of the given lengths to as many parts, cyclically.
fn split(values: &[f32], lengths: &[usize], parts: &mut [Vec<f32>]) {
    for mut run in values.chunks_exact(lengths.iter().sum()) {
        for (&length, part) in lengths.iter().zip(&mut *parts) {
            let (first, rest) = run.split_at(length);
            part.extend(first);
            run = rest;
        }
    }
}

vectorized! {
    /// Scales a vector to length 1 / `factor`.
    fn shorten(x: &mut [f32], factor: f32) = shorten_loop;
}

#[inline(always)]
fn shorten_loop(x: &mut [f32], factor: f32) {
    let length = (dot(Activations::F32(x), 0, x) + EPSILON).sqrt() * factor;
    x.iter_mut().for_each(|x| *x /= length);
}

vectorized! {
    /// Updates a state by a token: `output` holds the token's values, and afterwards the result of its query.
    fn update(state: &mut [f32], vectors: [&[f32]; 2], rates: [f32; 2], output: &mut [f32]) = update_loop;
}

#[inline(always)]
fn update_loop(state: &mut [f32], [query, key]: [&[f32]; 2], [decay, rate]: [f32; 2], output: &mut [f32]) {
    let width = output.len();
    let mut known = vec![0.0; width];
    for (row, k) in state.chunks_exact_mut(width).zip(key) {
        for (state, known) in row.iter_mut().zip(&mut known) {
            *state *= decay;
            *known += *state * k;
        }
    }
    let lacking = output.iter_mut().zip(&mut known);
    lacking.for_each(|(value, known)| {
        *known = (*value - *known) * rate;
        *value = 0.0;
    });
    for (row, (k, q)) in state.chunks_exact_mut(width).zip(key.iter().zip(query)) {
        for (state, (added, output)) in row.iter_mut().zip(known.iter().zip(&mut *output)) {
            *state += k * added;
            *output += q * *state;
        }
    }
}

impl Mixing for Step<'_> {
    fn prefetch(&self) -> &Prefetch<'_> {
        &self.prefetch
    }

    fn run<'s>(&'s self, thread: &mut Thread<'_, 's>, x: &[f32], _: &Rotation, next: &'s Prefetch<'s>) {
        self.inputs
            .multiply(thread, Activations::F32(x), Some(&self.output.prefetch));
        let token = thread.once(&self.token, || self.token());
        thread.phase(self.outputs.len(), |head| {
            self.outputs[head].get_or_init(|| self.head(head, token));
        });
        let mixed = thread.once(&self.mixed, || {
            let made = self
                .outputs
                .iter()
                .flat_map(|slot| slot.get().expect("the units are done"));
            made.copied().collect()
        });
        self.output.multiply(thread, mixed, next);
    }

    fn output(&self) -> &Output<'_> {
        &self.output
    }

    fn finish(mut self: Box<Self>) {
        let token = self.token.into_inner().expect("the region has ended");
        self.window.put(0, &token.window);
    }
}
