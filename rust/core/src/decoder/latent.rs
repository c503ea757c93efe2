//! Attention to latents (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! The cache holds a latent and a rotated key per token, which all heads share. A head's keys and values are products
//! of the latent: k = K c, v = V c. They are never computed: q k = (K^T q) c, and the sum of values is V times the
//! sum of latents, so a step reads K and V once instead of once per token.

use std::sync::OnceLock;

use super::norm::Norm;
use super::output::Output;
use super::past::{Own, Past};
use super::rotary::Rotation;
use super::softmax::{Reading, Rows, Softmax};
use super::step::Mixing;
use super::sums::add_rows;
use super::{Linear, require};
use crate::Result;
use crate::gemm::dense::dot;
use crate::gemm::layer::Job;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::Thread;
use crate::simd::{Isa, vectorized};
use crate::types::{Activations, from_bf16};

/// Attention to latents.
pub struct Latent<'a> {
    /// The low-rank projection of queries and its norm; without it, queries are projections of the hidden state.
    pub query_latent: Option<(Linear<'a>, Norm<'a>)>,
    /// Queries, heads * (plain + rotated) rows: for each head the plain values, then the rotated ones.
    pub query: Linear<'a>,
    /// The latent, then the rotated key: rank + rotated rows.
    pub latent: Linear<'a>,
    /// The norm of the latent, rank values.
    pub norm: Norm<'a>,
    /// The expansion of the latent: for each head K, plain x rank, then V, width x rank.
    pub expansion: Activations<'a>,
    /// The output projection: heads * width columns.
    pub output: Linear<'a>,
    /// The number of heads.
    pub heads: usize,
    /// The factor of products of queries and keys.
    pub scale: f32,
}

/// A token's queries, latent and rotated key.
struct Token {
    /// Queries, heads x (plain + rotated).
    queries: Vec<f32>,
    /// The latent in the precision of the cache.
    latent: Own,
    /// The rotated key in the precision of the cache.
    key: Own,
}

/// The attention of a step.
struct Step<'a> {
    weights: &'a Latent<'a>,
    past: Past<'a>,
    /// The projections of the latent with the rotated key, and of queries or their latent.
    inputs: Matrices<'a>,
    /// The latent of queries after its norm.
    query_latent: OnceLock<Vec<f32>>,
    queries: Option<Matrices<'a>>,
    output: Output<'a>,
    /// The memory that the inputs read first.
    prefetch: Prefetch<'a>,
    token: OnceLock<Token>,
    /// K^T q of each head.
    absorbed: Vec<OnceLock<Vec<f32>>>,
    joined: OnceLock<Vec<f32>>,
    softmax: Softmax,
    /// The output of each head.
    expanded: Vec<OnceLock<Vec<f32>>>,
    mixed: OnceLock<Vec<f32>>,
    isa: Isa,
}

/// The sizes of latent attention.
#[derive(Clone, Copy)]
struct Sizes {
    rank: usize,
    /// The number of plain values of a head's query.
    plain: usize,
    /// The number of rotated values of a head's query.
    rotated: usize,
    /// The width of a head's output.
    width: usize,
}

impl Latent<'_> {
    fn sizes(&self) -> Sizes {
        let (heads, rank) = (self.heads.max(1), self.norm.weight.len());
        let rotated = self.latent.weights.shape().rows.saturating_sub(rank);
        Sizes {
            rank,
            plain: (self.query.weights.shape().rows / heads).saturating_sub(rotated),
            rotated,
            width: self.output.weights.shape().columns / heads,
        }
    }

    pub(super) fn mixing<'a>(&'a self, past: Past<'a>, threads: usize, isa: Isa) -> Box<dyn Mixing + 'a> {
        let job = || Job::of_offsets(&[0, 1]);
        let first = self
            .query_latent
            .as_ref()
            .map_or(&self.query, |(linear, _)| linear);
        let inputs = Matrices::new(&[&*self.latent.weights, &*first.weights], job(), threads);
        let second = self.query_latent.as_ref().map(|_| &*self.query.weights);
        let slots = || (0..self.heads).map(|_| OnceLock::new()).collect();
        Box::new(Step {
            weights: self,
            softmax: Softmax::new(self.heads, 1, &past),
            past,
            prefetch: inputs.prefetch(threads),
            inputs,
            query_latent: OnceLock::new(),
            queries: second.map(|weights| Matrices::new(&[weights], job(), threads)),
            output: Output::new(&self.output, threads),
            token: OnceLock::new(),
            absorbed: slots(),
            joined: OnceLock::new(),
            expanded: slots(),
            mixed: OnceLock::new(),
            isa,
        })
    }

    pub(super) fn check(&self, hidden: usize, rotated: usize) -> Result<()> {
        let (heads, sizes) = (self.heads, self.sizes());
        let expansion = heads * (sizes.plain + sizes.width) * sizes.rank;
        let fits = heads > 0 && sizes.rank > 0 && sizes.width > 0 && sizes.rotated == rotated;
        require(fits && self.expansion.len() == expansion, || {
            let Sizes {
                rank, rotated: found, ..
            } = sizes;
            format!(
                "the sizes of latent attention or its expansion do not match: {heads} heads, \
                 latents of {rank} values, {found} of {rotated} rotated"
            )
        })?;
        let mut columns = hidden;
        if let Some((linear, norm)) = &self.query_latent {
            columns = linear.weights.shape().rows;
            linear.check(columns, hidden, "the first query projection")?;
            norm.check(columns, "the norm of queries")?;
        }
        self.query
            .check(heads * (sizes.plain + rotated), columns, "the query projection")?;
        self.latent
            .check(sizes.rank + rotated, hidden, "the projection to latents")?;
        self.output
            .check(hidden, heads * sizes.width, "the output projection")
    }

    pub(super) fn check_past(&self, past: &Past) -> Result<()> {
        let sizes = self.sizes();
        past.check(1, [sizes.rank, sizes.rotated])
    }
}

impl Step<'_> {
    /// The products of an input, with its bias.
    fn input(&self, index: usize, linear: &Linear) -> Vec<f32> {
        let mut sums = self.inputs.values(index).to_vec();
        linear.add_bias(&mut sums);
        sums
    }

    /// The queries before rotation.
    fn queries<'s>(&'s self, thread: &mut Thread<'_, 's>) -> &'s [f32] {
        let (Some(queries), Some((linear, norm))) = (&self.queries, &self.weights.query_latent) else {
            return self.inputs.values(1);
        };
        let latent = thread.once(&self.query_latent, || {
            let mut latent = self.input(1, linear);
            norm.apply(self.isa, &mut latent);
            latent
        });
        queries.multiply(thread, Activations::F32(latent), Some(&self.output.prefetch));
        queries.values(0)
    }

    fn token(&self, products: &[f32], rotation: &Rotation) -> Token {
        let (weights, sizes) = (self.weights, self.weights.sizes());
        let mut queries = products.to_vec();
        weights.query.add_bias(&mut queries);
        rotation.apply(&mut queries, sizes.plain + sizes.rotated, sizes.plain);
        let mut latent = self.input(0, &weights.latent);
        let mut key = latent.split_off(sizes.rank);
        weights.norm.apply(self.isa, &mut latent);
        rotation.apply(&mut key, sizes.rotated, 0);
        Token {
            queries,
            latent: Own::new(&self.past.keys, latent, sizes.rank),
            key: Own::new(&self.past.values, key, sizes.rotated),
        }
    }

    /// K^T q of a head, followed by the rotated part of its query.
    fn absorb(&self, head: usize, token: &Token) -> Vec<f32> {
        let Sizes {
            rank,
            plain,
            rotated,
            width,
        } = self.weights.sizes();
        let query = &token.queries[head * (plain + rotated)..][..plain + rotated];
        let mut sums = vec![0.0; rank];
        let first = head * (plain + width) * rank;
        weighted(
            self.isa,
            self.weights.expansion,
            first,
            &query[..plain],
            &mut sums,
        );
        sums.extend(&query[plain..]);
        sums
    }

    /// V times the weighted sum of latents of a head.
    fn expand(&self, head: usize) -> Vec<f32> {
        let Sizes {
            rank, plain, width, ..
        } = self.weights.sizes();
        let (mut latent, mut output) = (vec![0.0; rank], vec![0.0; width]);
        self.softmax.read(head, None, &mut latent);
        let first = (head * (plain + width) + plain) * rank;
        products(self.isa, self.weights.expansion, first, &latent, &mut output);
        output
    }
}

vectorized! {
    /// The weighted sum of rows, starting at value `first`.
    fn weighted(matrix: Activations, first: usize, weights: &[f32], sums: &mut [f32]) = weighted_loop;
}

#[inline(always)]
fn weighted_loop(matrix: Activations, first: usize, weights: &[f32], sums: &mut [f32]) {
    let columns = sums.len();
    match matrix {
        Activations::F32(values) => {
            add_rows(
                sums,
                weights,
                |row| &values[first + row * columns..],
                |value| value,
            );
        }
        Activations::Bf16(values) => {
            add_rows(sums, weights, |row| &values[first + row * columns..], from_bf16);
        }
    }
}

vectorized! {
    /// The products of rows, starting at value `first`.
    fn products(matrix: Activations, first: usize, x: &[f32], y: &mut [f32]) = products_loop;
}

#[inline(always)]
fn products_loop(matrix: Activations, first: usize, x: &[f32], y: &mut [f32]) {
    for (row, y) in y.iter_mut().enumerate() {
        *y = dot(matrix, first + row * x.len(), x);
    }
}

/// Concatenates the results of several units.
fn join(slots: &[OnceLock<Vec<f32>>]) -> Vec<f32> {
    let made = slots
        .iter()
        .flat_map(|slot| slot.get().expect("the units are done"));
    made.copied().collect()
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
        let products = self.queries(thread);
        let token = thread.once(&self.token, || self.token(products, rotation));
        thread.phase(self.absorbed.len(), |head| {
            self.absorbed[head].get_or_init(|| self.absorb(head, token));
        });
        let queries = thread.once(&self.joined, || join(&self.absorbed));
        let sizes = self.weights.sizes();
        let latents = Rows {
            past: self.past.keys.read(1, sizes.rank),
            own: &token.latent.rounded,
        };
        let keys = Rows {
            past: self.past.values.read(1, sizes.rotated),
            own: &token.key.rounded,
        };
        let reading = Reading {
            queries,
            keys: &[latents, keys],
            values: latents,
            scale: self.weights.scale,
        };
        thread.phase(self.softmax.units(), |unit| {
            self.softmax.compute(self.isa, unit, reading);
        });
        thread.phase(self.expanded.len(), |head| {
            self.expanded[head].get_or_init(|| self.expand(head));
        });
        let mixed = thread.once(&self.mixed, || join(&self.expanded));
        self.output.multiply(thread, mixed, next);
    }

    fn output(&self) -> &Output<'_> {
        &self.output
    }

    fn finish(mut self: Box<Self>) {
        let token = self.token.into_inner().expect("the region has ended");
        self.past.push(1, &token.latent, &token.key);
    }
}
