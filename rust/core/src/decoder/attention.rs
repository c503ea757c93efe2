//! Attention of one token: queries against the keys of all tokens before and its own.
//!
//! The tokens are cut into runs of [`RUN`]. A unit of work is a run of a group of heads: it reads the group's keys and
//! values once for all its heads, and keeps the softmax relative to its own largest score; runs are put together
//! afterwards.

use std::ops::Range;
use std::sync::OnceLock;

use super::past::{Past, Read};
use super::rotary::Turn;
use super::{Attention, require};
use crate::Result;
use crate::gemm::dense::dot;
use crate::gemm::layer::exp;
use crate::simd::{Isa, vectorized};
use crate::types::{Activations, from_bf16};

/// Tokens of a unit of work.
const RUN: usize = 256;
/// Columns of values that are summed up in registers: four of 16.
const LANES: usize = 64;

/// A token's queries, keys and values, turned to its position.
pub(super) struct Heads {
    /// heads x width.
    queries: Vec<f32>,
    /// groups x width, as the cache holds them.
    pub keys: Vec<f32>,
    /// groups x width, as the cache holds them.
    pub values: Vec<f32>,
}

/// What a run of tokens gives to a group of heads.
pub(super) struct Part {
    /// For each head of the group, its largest score and the sum of exp(score - largest).
    heads: Vec<(f32, f32)>,
    /// heads x width: the sum of exp(score - largest) times values.
    values: Vec<f32>,
}

/// A layer's attention at a step.
pub(super) struct Mixing<'a> {
    keys: Read<'a>,
    values: Read<'a>,
    /// Tokens, with the one at hand.
    tokens: usize,
    groups: usize,
    /// Heads that share keys and values.
    sharing: usize,
    width: usize,
    scale: f32,
    parts: Vec<OnceLock<Part>>,
}

impl Attention<'_> {
    pub(super) fn groups(&self) -> usize {
        self.key.weights.shape().rows / self.width.max(1)
    }

    /// The token's heads, from its products with the matrices.
    pub(super) fn heads(&self, isa: Isa, products: [&[f32]; 3], turn: &Turn, past: &Past) -> Heads {
        let linears = [&self.query, &self.key, &self.value];
        let mut number = 0;
        let [mut queries, mut keys, mut values] = products.map(|product| {
            let mut sums = product.to_vec();
            linears[number].add_bias(&mut sums);
            number += 1;
            sums
        });
        for (norm, heads) in [(&self.query_norm, &mut queries), (&self.key_norm, &mut keys)] {
            if let Some(norm) = norm {
                norm.apply(isa, heads);
            }
            turn.apply(heads);
        }
        past.keys.round(&mut keys);
        past.values.round(&mut values);
        Heads {
            queries,
            keys,
            values,
        }
    }

    pub(super) fn mixing<'a>(&self, past: &'a Past) -> Mixing<'a> {
        let (groups, tokens) = (self.groups(), past.length + 1);
        Mixing {
            keys: past.keys.read(groups, self.width),
            values: past.values.read(groups, self.width),
            tokens,
            groups,
            sharing: self.query.weights.shape().rows / self.width / groups,
            width: self.width,
            scale: self.scale,
            parts: (0..groups * tokens.div_ceil(RUN))
                .map(|_| OnceLock::new())
                .collect(),
        }
    }

    pub(super) fn check(&self, hidden: usize) -> Result<()> {
        let (rows, few) = (self.query.weights.shape().rows, self.key.weights.shape().rows);
        let width = self.width.max(1);
        let fits = self.width > 0 && few > 0 && few % width == 0 && rows > 0 && rows % few == 0;
        require(fits, || {
            format!("{rows} rows of queries and {few} of keys for heads of width {width}")
        })?;
        self.norm.check(hidden, "the norm before attention")?;
        self.query.check(rows, hidden, "the query projection")?;
        self.key.check(few, hidden, "the key projection")?;
        self.value.check(few, hidden, "the value projection")?;
        self.output.check(hidden, rows, "the output projection")?;
        for (norm, rows) in [(&self.query_norm, rows), (&self.key_norm, few)] {
            let fits = |len| len == width || len == rows;
            require(norm.is_none_or(|norm| fits(norm.weight.len())), || {
                format!("a norm of heads is neither {width} nor {rows} long")
            })?;
        }
        Ok(())
    }
}

impl super::Linear<'_> {
    pub(super) fn add_bias(&self, sums: &mut [f32]) {
        if let Some(bias) = self.bias {
            let mut values = vec![0.0; sums.len()];
            bias.widen(0, &mut values);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
}

impl Mixing<'_> {
    /// Units of work.
    pub fn units(&self) -> usize {
        self.parts.len()
    }

    /// Does a unit.
    pub fn compute(&self, isa: Isa, unit: usize, heads: &Heads) {
        let (group, first) = (unit % self.groups, unit / self.groups * RUN);
        let tokens = first..(first + RUN).min(self.tokens);
        let part = run(isa, self, heads, group, tokens);
        self.parts[unit].get_or_init(|| part);
    }

    /// What the heads have read, heads x width, once all units are done.
    pub fn outputs(&self) -> Vec<f32> {
        let mut outputs = vec![0.0; self.groups * self.sharing * self.width];
        for (head, output) in outputs.chunks_exact_mut(self.width).enumerate() {
            let (group, number) = (head / self.sharing, head % self.sharing);
            let parts = self.parts.iter().skip(group).step_by(self.groups);
            let parts: Vec<&Part> = parts
                .map(|part| part.get().expect("all units are done"))
                .collect();
            let largest = parts.iter().map(|part| part.heads[number].0);
            let largest = largest.fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            for part in parts {
                let (top, sum) = part.heads[number];
                let factor = exp(top - largest);
                total += factor * sum;
                let values = &part.values[number * self.width..][..self.width];
                output
                    .iter_mut()
                    .zip(values)
                    .for_each(|(out, value)| *out += factor * value);
            }
            output.iter_mut().for_each(|out| *out /= total);
        }
        outputs
    }
}

vectorized! {
    fn run(mixing: &Mixing, heads: &Heads, group: usize, tokens: Range<usize>) -> Part = run_loop;
}

/// A group's heads over some tokens, of which the last of all is the one at hand.
#[inline(always)]
fn run_loop(mixing: &Mixing, heads: &Heads, group: usize, tokens: Range<usize>) -> Part {
    let (width, sharing) = (mixing.width, mixing.sharing);
    let queries = &heads.queries[group * sharing * width..][..sharing * width];
    let own = group * width..(group + 1) * width;
    let past = tokens.start..tokens.end.min(mixing.tokens - 1);
    // sharing x tokens.
    let mut scores = vec![0.0; sharing * tokens.len()];
    let mut key = vec![0.0; width];
    for at in 0..tokens.len() {
        match at < past.len() {
            true => mixing
                .keys
                .values
                .widen(mixing.keys.at(group, past.start + at), &mut key),
            false => key.copy_from_slice(&heads.keys[own.clone()]),
        }
        let scores = scores[at..].iter_mut().step_by(tokens.len());
        for (query, score) in queries.chunks_exact(width).zip(scores) {
            *score = dot(Activations::F32(&key), 0, query) * mixing.scale;
        }
    }
    let mut part = Part {
        heads: Vec::with_capacity(sharing),
        values: vec![0.0; sharing * width],
    };
    for (scores, sums) in scores
        .chunks_exact_mut(tokens.len())
        .zip(part.values.chunks_exact_mut(width))
    {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        scores.iter_mut().for_each(|score| *score = exp(*score - largest));
        part.heads.push((largest, scores.iter().sum()));
        let (before, last) = scores.split_at(past.len());
        let row = |at| mixing.values.at(group, past.start + at);
        match mixing.values.values {
            Activations::F32(values) => add(sums, before, |at| &values[row(at)..], |value| value),
            Activations::Bf16(values) => add(sums, before, |at| &values[row(at)..], from_bf16),
        }
        add(sums, last, |_| &heads.values[own.clone()], |value| value);
    }
    part
}

/// Adds rows, each times its weight, to `sums`, one after the other, and some columns at a time in registers.
#[inline(always)]
fn add<'v, T: Copy + 'v>(
    sums: &mut [f32],
    weights: &[f32],
    row: impl Fn(usize) -> &'v [T],
    wide: impl Fn(T) -> f32,
) {
    let whole = sums.len() - sums.len() % LANES;
    for (number, sums) in sums.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut lanes = *sums;
        for (at, &weight) in weights.iter().enumerate() {
            let row = &row(at)[number * LANES..][..LANES];
            for lane in 0..LANES {
                lanes[lane] += weight * wide(row[lane]);
            }
        }
        *sums = lanes;
    }
    for (at, &weight) in weights.iter().enumerate() {
        let pairs = sums[whole..].iter_mut().zip(&row(at)[whole..]);
        pairs.for_each(|(sum, &value)| *sum += weight * wide(value));
    }
}
