//! Softmax attention over the tokens of a cache: the softmax of queries times keys, and the weighted sums of values.
//!
//! The tokens are divided into runs of [`RUN`], and heads that share keys into bundles of [`BUNDLE`]. A unit of work
//! is a run of a bundle: it reads keys and values once for all its heads, and keeps the softmax relative to its own
//! largest score; runs are combined afterwards.

use std::ops::Range;
use std::sync::OnceLock;

use super::past::{Past, Read};
use super::sums::add_rows;
use crate::gemm::dense::dot;
use crate::gemm::layer::exp;
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// The number of tokens of a unit of work.
const RUN: usize = 256;
/// The maximum number of heads of a unit of work.
const BUNDLE: usize = 8;

/// The rows of the cache and that of the current token, which have the same width in each group.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub past: Read<'a>,
    pub own: &'a [f32],
}

/// The inputs of heads.
#[derive(Clone, Copy)]
pub(super) struct Reading<'a> {
    /// heads x the width of keys.
    pub queries: &'a [f32],
    /// The parts of the keys, which are concatenated.
    pub keys: &'a [Rows<'a>],
    pub values: Rows<'a>,
    /// The factor of products of queries and keys.
    pub scale: f32,
}

/// The result of a run of tokens for a bundle of heads.
struct Part {
    /// For each head, its largest score and the sum of exp(score - largest).
    heads: Vec<(f32, f32)>,
    /// heads x width: the sum of exp(score - largest) times values.
    values: Vec<f32>,
}

/// The units of work of a layer's heads in a step.
pub(super) struct Softmax {
    /// The visible tokens; the last is the current one.
    tokens: Range<usize>,
    heads: usize,
    /// The number of heads of a group.
    sharing: usize,
    /// The number of bundles of a group.
    bundles: usize,
    parts: Vec<OnceLock<Part>>,
}

impl Softmax {
    pub fn new(heads: usize, groups: usize, past: &Past) -> Softmax {
        let tokens = past.first..past.length + 1;
        let sharing = heads / groups;
        let bundles = sharing.div_ceil(BUNDLE);
        let units = groups * bundles * tokens.len().div_ceil(RUN);
        Softmax {
            tokens,
            heads,
            sharing,
            bundles,
            parts: (0..units).map(|_| OnceLock::new()).collect(),
        }
    }

    /// The number of units of work.
    pub fn units(&self) -> usize {
        self.parts.len()
    }

    /// The number of bundles of all groups.
    fn columns(&self) -> usize {
        self.heads / self.sharing * self.bundles
    }

    /// Computes a unit.
    pub fn compute(&self, isa: Isa, unit: usize, reading: Reading) {
        let (bundle, run) = (unit % self.columns(), unit / self.columns());
        let (group, number) = (bundle / self.bundles, bundle % self.bundles);
        let first = group * self.sharing + number * BUNDLE;
        let heads = first..(first + BUNDLE).min((group + 1) * self.sharing);
        let start = self.tokens.start + run * RUN;
        let tokens = start..(start + RUN).min(self.tokens.end);
        let part = part(isa, reading, group, heads, tokens, self.tokens.end - 1);
        self.parts[unit].get_or_init(|| part);
    }

    /// The output of a head after all units are done; a sink takes part in the softmax but has no values.
    pub fn read(&self, head: usize, sink: Option<f32>, output: &mut [f32]) {
        let (group, within) = (head / self.sharing, head % self.sharing);
        let (column, number) = (group * self.bundles + within / BUNDLE, within % BUNDLE);
        let parts = self.parts.iter().skip(column).step_by(self.columns());
        let parts: Vec<&Part> = parts
            .map(|part| part.get().expect("all units are done"))
            .collect();
        let largest = parts.iter().map(|part| part.heads[number].0).chain(sink);
        let largest = largest.fold(f32::NEG_INFINITY, f32::max);
        let mut total = sink.map_or(0.0, |sink| exp(sink - largest));
        output.fill(0.0);
        for part in parts {
            let (top, sum) = part.heads[number];
            let factor = exp(top - largest);
            total += factor * sum;
            let values = &part.values[number * output.len()..][..output.len()];
            output
                .iter_mut()
                .zip(values)
                .for_each(|(out, value)| *out += factor * value);
        }
        output.iter_mut().for_each(|out| *out /= total);
    }
}

vectorized! {
    fn part(reading: Reading, group: usize, heads: Range<usize>, tokens: Range<usize>, last: usize) -> Part
        = part_loop;
}

/// Computes heads over some tokens; token `last` is the current one.
#[inline(always)]
fn part_loop(reading: Reading, group: usize, heads: Range<usize>, tokens: Range<usize>, last: usize) -> Part {
    let width = reading.keys.iter().map(|keys| keys.past.width).sum();
    let queries = &reading.queries[heads.start * width..heads.end * width];
    // heads x tokens.
    let mut scores = vec![0.0; heads.len() * tokens.len()];
    let mut key = vec![0.0; width];
    for at in 0..tokens.len() {
        let mut start = 0;
        for keys in reading.keys {
            let part = &mut key[start..start + keys.past.width];
            keys.widen(group, tokens.start + at, last, part);
            start += keys.past.width;
        }
        let scores = scores[at..].iter_mut().step_by(tokens.len());
        for (query, score) in queries.chunks_exact(width).zip(scores) {
            *score = dot(Activations::F32(&key), 0, query) * reading.scale;
        }
    }
    let values = reading.values.past.width;
    let mut part = Part {
        heads: Vec::with_capacity(heads.len()),
        values: vec![0.0; heads.len() * values],
    };
    let before = tokens.start..tokens.end.min(last);
    for (scores, sums) in scores
        .chunks_exact_mut(tokens.len())
        .zip(part.values.chunks_exact_mut(values))
    {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        scores.iter_mut().for_each(|score| *score = exp(*score - largest));
        part.heads.push((largest, scores.iter().sum()));
        let (weights, own) = scores.split_at(before.len());
        let past = reading.values.past;
        past.add(group, before.start, weights, sums);
        add_rows(
            sums,
            own,
            |_| &reading.values.own[group * values..],
            |value| value,
        );
    }
    part
}

impl Rows<'_> {
    /// A token's row of a group; token `last` is the current one.
    #[inline(always)]
    fn widen(&self, group: usize, token: usize, last: usize, out: &mut [f32]) {
        match token < last {
            true => self.past.widen(group, token, out),
            false => out.copy_from_slice(&self.own[group * out.len()..][..out.len()]),
        }
    }
}
