//! A layer of experts that computes, for each token, only the channels that pass a threshold.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rayon::ThreadPool;

use super::rows::{self, RUN};
use super::term::Term;
use super::token::Token;
use crate::formats::channels::{GROUP, View};
use crate::gemm::layer::cut::{self, Cut};
use crate::gemm::layer::output::Output;
use crate::gemm::layer::region::{self, Thread, Threads};
use crate::gemm::layer::routing::Sorted;
use crate::gemm::layer::{Job, Products, Projection, Routing, Slots, gated};
use crate::simd::Isa;
use crate::types::{Activations, Shape};
use crate::{Error, Result};

/// The maximum number of blocks of an expert's channels: enough for the threads, few enough to be added cheaply.
const BLOCKS: usize = 32;
/// The minimum number of channels of a block.
const LEAST_CHANNELS: usize = 64;
/// The maximum bytes of all blocks' outputs, unless one block per expert and token takes more.
const BLOCK_BYTES: usize = 64 << 20;
/// The columns that a unit of the last phase adds up.
const BAND: usize = 1024;

/// The up projection outputs, which decide which channels are computed.
#[derive(Clone, Copy)]
pub enum Ups<'a> {
    /// Up projections, E x I x H: channels with an output u below their expert's threshold are skipped.
    Of(&'a dyn Projection),
    /// Outputs u, tokens x top_k x I: channels with u = 0 are skipped, because they contribute nothing.
    Given(&'a [f32]),
    /// Outputs of coarse up and gate projections; records hold the differences of finer weights.
    Refining {
        /// Outputs u, zero for skipped channels.
        ups: &'a [f32],
        /// Outputs of the gates, tokens x top_k x I.
        gates: &'a [f32],
    },
}

impl<'a> Ups<'a> {
    /// The outputs passed by the caller.
    fn given(self) -> &'a [f32] {
        match self {
            Ups::Of(_) => &[],
            Ups::Given(values) | Ups::Refining { ups: values, .. } => values,
        }
    }
}

/// The projections of a layer: the records of gate and down are E x I x 2 H.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Up projections, or their outputs.
    pub ups: Ups<'a>,
    /// Gate rows, down columns and thresholds.
    pub channels: View<'a>,
}

impl Layer<'_> {
    /// Computes the layer: `x` and `y` are T x H. The terms of a token are added in the order of its experts' list.
    ///
    /// Returns the number of computed channels, over all tokens and their experts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if sizes do not match or the processor lacks the instruction set.
    pub fn forward<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        routing: Routing,
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<u64> {
        let pass = self.run(x.into(), &routing, y, isa, pool)?;
        Ok(pass.map_or(0, |pass| pass.computed.into_inner()))
    }

    /// Computes the contributions of refined channels to the outputs of coarse copies. The values silu(gate) * u of
    /// these channels are written to `inner` (tokens x top_k x I; other channels are unchanged); their products with
    /// coarse down columns are not included.
    ///
    /// Returns the number of refined channels.
    ///
    /// # Errors
    /// As for `forward`; the layer must be [`Ups::Refining`].
    pub fn refine<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        routing: Routing,
        y: &mut [f32],
        inner: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<u64> {
        let (Ups::Refining { ups, .. }, true) = (self.ups, inner.len() == self.ups.given().len()) else {
            return Err(Error::InvalidArgument("refining needs coarse outputs".into()));
        };
        let Some(pass) = self.run(x.into(), &routing, y, isa, pool)? else {
            return Ok(0);
        };
        let rows = self.channels.layout().shape().rows;
        let refined = pass.inner.as_ref().map_or(&[][..], Output::values);
        for (values, &pair) in refined.chunks_exact(rows.max(1)).zip(&pass.pairs) {
            let own = pair * rows..(pair + 1) * rows;
            let places = inner[own.clone()].iter_mut().zip(&ups[own]).zip(values);
            places
                .filter(|((_, up), _)| **up != 0.0)
                .for_each(|((inner, _), value)| *inner = *value);
        }
        Ok(pass.computed.into_inner())
    }

    /// Computes the layer; returns at once if there are no tokens.
    fn run<'a>(
        &'a self,
        x: Activations,
        routing: &Routing,
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<Option<Pass<'a>>> {
        let isa = isa.vectors();
        let columns = self.channels.layout().half();
        self.check(routing)?;
        routing.check(columns, &x, y)?;
        if x.len() == 0 {
            return Ok(None);
        }
        let tokens = x.len() / columns;
        let pass = Pass::new(*self, routing, tokens, pool.current_num_threads(), isa);
        let bands = columns.div_ceil(BAND);
        let y = Output::new(y, columns, tokens * bands);
        region::run(pool, Threads::of(pass.alone(), tokens), |thread| {
            pass.ups(thread, x);
            pass.channels(thread);
            thread.phase(tokens * bands, |unit| {
                let (token, first) = (unit / bands, unit % bands * BAND);
                let band = first..(first + BAND).min(columns);
                // SAFETY: each unit has its own token and columns.
                unsafe { y.fill(unit, token..token + 1, band.clone(), &pass.sum(token, band)) }
            });
        });
        match pass.incomplete.load(Ordering::Relaxed) {
            false => Ok(Some(pass)),
            true => Err(Error::InvalidArgument(
                "channels: a record is not in memory".into(),
            )),
        }
    }

    /// Checks that projections and records match, also with the routing.
    fn check(&self, routing: &Routing) -> Result<()> {
        let records = self.channels.layout().shape();
        let (fits, what) = match self.ups {
            Ups::Of(up) => {
                let up = up.shape();
                let fits =
                    (up.experts, up.rows, 2 * up.columns) == (records.experts, records.rows, records.columns);
                (fits, format!("{up:?}"))
            }
            Ups::Given(values) | Ups::Refining { ups: values, .. } => {
                let gates = match self.ups {
                    Ups::Refining { gates, .. } => gates.len(),
                    _ => values.len(),
                };
                let count = routing.experts.len().checked_mul(records.rows);
                let fits = count == Some(values.len()) && gates == values.len();
                (
                    fits,
                    format!("{} outputs of up and {gates} of gates", values.len()),
                )
            }
        };
        match fits {
            true => Ok(()),
            false => Err(Error::InvalidArgument(format!(
                "up and channels do not match: {what}, {records:?}"
            ))),
        }
    }
}

/// The up projection of a call.
struct Up<'a> {
    projection: &'a dyn Projection,
    products: Box<dyn Products + 'a>,
    cut: Cut,
    /// Places x channels.
    outputs: Output<'a>,
}

impl<'a> Up<'a> {
    fn new(projection: &'a dyn Projection, job: &Arc<Job>, threads: usize) -> Up<'a> {
        let cut = Cut::new(&[projection], job, threads);
        Up {
            products: projection.products(job),
            outputs: Output::owned(job.list.len(), projection.shape().rows, cut.units(job)),
            projection,
            cut,
        }
    }
}

/// A layer and the tokens of a call, for a single computation.
struct Pass<'a> {
    layer: Layer<'a>,
    /// The up projection, unless its outputs are given.
    up: Option<Up<'a>>,
    job: Arc<Job>,
    tokens: Slots<Token>,
    /// The pair of the routing at each place.
    pairs: Vec<usize>,
    /// The channels of a block, and the blocks of an expert.
    step: usize,
    blocks: usize,
    /// The number of blocks added up where they are computed: all of an expert's if a single thread computes,
    /// otherwise 1.
    merged: usize,
    /// The outputs of merged blocks, places x (blocks / merged x padded columns).
    parts: Output<'a>,
    /// For refined channels, their values after SiLU, places x channels.
    inner: Option<Output<'a>>,
    /// For each token, the places and weights of its experts.
    terms: Vec<Vec<(usize, f32)>>,
    computed: AtomicU64,
    /// Whether a needed record is not in memory.
    incomplete: AtomicBool,
    isa: Isa,
}

impl<'a> Pass<'a> {
    fn new(layer: Layer<'a>, routing: &Routing, tokens: usize, threads: usize, isa: Isa) -> Pass<'a> {
        let (Shape { experts, rows, .. }, half) =
            (layer.channels.layout().shape(), layer.channels.layout().half());
        let Sorted { job, places } = Sorted::new(routing, tokens, experts);
        let (job, part) = (Arc::new(job), half.next_multiple_of(GROUP));
        let most = (BLOCK_BYTES / (4 * part * job.list.len()).max(1)).clamp(1, BLOCKS);
        let step = rows.div_ceil(most).max(LEAST_CHANNELS);
        let blocks = rows.div_ceil(step);
        let merged = if threads == 1 { blocks.max(1) } else { 1 };
        let mut pairs = vec![0; job.list.len()];
        let placed = places.iter().enumerate();
        placed.for_each(|(pair, place)| place.iter().for_each(|&place| pairs[place] = pair));
        let weighted = places.into_iter().zip(routing.weights).collect::<Vec<_>>();
        let terms = weighted.chunks(routing.top_k.max(1)).map(|terms| {
            let there = terms
                .iter()
                .filter_map(|(place, weight)| Some(((*place)?, **weight)));
            there.collect()
        });
        Pass {
            up: match layer.ups {
                Ups::Of(up) => Some(Up::new(up, &job, threads)),
                Ups::Given(_) | Ups::Refining { .. } => None,
            },
            tokens: Slots::new(tokens),
            pairs,
            inner: matches!(layer.ups, Ups::Refining { .. })
                .then(|| Output::owned(job.list.len(), rows, job.tasks.len() * blocks)),
            parts: Output::owned(
                job.list.len(),
                blocks / merged * part,
                job.tasks.len() * (blocks / merged),
            ),
            terms: terms.collect(),
            computed: AtomicU64::new(0),
            incomplete: AtomicBool::new(false),
            layer,
            job,
            step,
            blocks,
            merged,
            isa,
        }
    }

    /// Returns whether the up projection is too small to wake threads.
    fn alone(&self) -> bool {
        let up = self.up.as_ref();
        up.is_some_and(|up| cut::alone(&[up.projection], &self.job))
    }

    /// The phases of the up projection.
    fn ups(&self, thread: &mut Thread, x: Activations) {
        let (width, columns) = (
            self.layer.channels.layout().width(),
            self.layer.channels.layout().half(),
        );
        let stages = self.up.as_ref().map_or([0; 2], |up| up.products.stages());
        for (stage, units) in stages.into_iter().enumerate() {
            let tokens = if stage == 0 { self.tokens.len() } else { 0 };
            thread.phase(units + tokens, |unit| match unit.checked_sub(units) {
                None => self.up.iter().for_each(|up| up.products.prepare(stage, unit, x)),
                Some(token) => self
                    .tokens
                    .fill(token, || Token::new(width, x, token * columns, columns)),
            });
        }
        let Some(Up {
            products,
            cut,
            outputs,
            ..
        }) = &self.up
        else {
            return;
        };
        let (mut up, mut values) = (products.worker(), Vec::new());
        thread.phase(cut.units(&self.job), |unit| {
            let (task, rows) = cut.at(unit);
            let places = self.job.tasks[task].places.clone();
            values.resize(places.len() * rows.len(), 0.0);
            up.multiply(task, rows.clone(), &mut values);
            // SAFETY: a place belongs to one task, and the units of a task have disjoint rows.
            unsafe { outputs.fill(unit, places, rows, &values) }
        });
    }

    /// The outputs of the up projection of a place.
    fn outputs(&self, place: usize) -> &[f32] {
        let rows = self.layer.channels.layout().shape().rows;
        match &self.up {
            Some(up) => &up.outputs.values()[place * rows..][..rows],
            None => &self.layer.ups.given()[self.pairs[place] * rows..][..rows],
        }
    }

    /// The phase of the channels.
    fn channels(&self, thread: &mut Thread) {
        let (part, parts) = (self.part(), self.blocks / self.merged);
        let (mut list, mut coming, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sums, mut totals) = (Vec::new(), Vec::new());
        thread.phase(self.job.tasks.len() * parts, |unit| {
            let (task, number) = (unit / parts, unit % parts);
            let places = self.job.tasks[task].places.clone();
            let blocks = number * self.merged..(number + 1) * self.merged;
            self.wanted(task, self.block(blocks.start), &mut list);
            for block in blocks.clone() {
                coming.clear();
                if block + 1 < blocks.end {
                    self.wanted(task, self.block(block + 1), &mut coming);
                }
                sums.clear();
                sums.resize(places.len() * part, 0.0);
                self.add_channels(task, [&list, &coming], &mut values, &mut sums);
                self.keep(
                    task * self.blocks + block,
                    places.clone(),
                    self.block(block),
                    &list,
                    &values,
                );
                self.computed.fetch_add(list.len() as u64, Ordering::Relaxed);
                match block == blocks.start {
                    true => std::mem::swap(&mut totals, &mut sums),
                    false => add(&mut totals, &sums),
                }
                std::mem::swap(&mut list, &mut coming);
            }
            // SAFETY: a place belongs to one task, and the blocks of a task have disjoint columns.
            unsafe {
                self.parts
                    .fill(unit, places, number * part..(number + 1) * part, &totals)
            }
        });
    }

    /// The channels of a block.
    fn block(&self, number: usize) -> Range<usize> {
        let rows = self.layer.channels.layout().shape().rows;
        number * self.step..((number + 1) * self.step).min(rows)
    }

    /// The columns of a part: those of an output, padded.
    fn part(&self) -> usize {
        self.layer.channels.layout().half().next_multiple_of(GROUP)
    }

    /// Lists the pairs of a channel and a place that are not skipped, ordered by channel. NaN is not skipped, so that
    /// it reaches the output.
    fn wanted(&self, task: usize, channels: Range<usize>, list: &mut Vec<(usize, usize)>) {
        let task = &self.job.tasks[task];
        let threshold = self.layer.channels.threshold(task.expert);
        let passes = |up: f32| match self.layer.ups {
            Ups::Of(_) => up.abs() >= threshold || up.is_nan(),
            Ups::Given(_) | Ups::Refining { .. } => up != 0.0,
        };
        list.clear();
        if task.places.len() == 1 {
            let ups = &self.outputs(task.places.start)[channels.clone()];
            let above = channels.zip(ups).filter(|(_, up)| passes(**up));
            list.extend(above.map(|(channel, _)| (channel, task.places.start)));
        } else {
            for channel in channels {
                let places = task.places.clone();
                let above = places.filter(|&place| passes(self.outputs(place)[channel]));
                list.extend(above.map(|place| (channel, place)));
            }
        }
        let first = task.expert * self.layer.channels.layout().shape().rows;
        let absent = |pair: &(usize, usize)| !self.layer.channels.is_there(first + pair.0);
        if list.iter().any(absent) {
            list.clear();
            self.incomplete.store(true, Ordering::Relaxed);
        }
    }

    /// Adds the channels of a list to the sums of the task's places; the channels of the other list are prefetched
    /// towards the end. `values` receives their values after SiLU.
    fn add_channels(
        &self,
        task: usize,
        [list, coming]: [&[(usize, usize)]; 2],
        values: &mut Vec<f32>,
        sums: &mut [f32],
    ) {
        values.clear();
        let (task, channels, part) = (&self.job.tasks[task], &self.layer.channels, self.part());
        let (width, rows) = (channels.layout().width(), channels.layout().shape().rows);
        let halves = |at: usize| {
            let found = list.get(at).or_else(|| coming.get(at - list.len()));
            let (channel, _) = found.unwrap_or(&list[list.len() - 1]);
            channels.halves(task.expert * rows + channel)
        };
        let (mut at, mut gates, mut downs) = (0, Vec::with_capacity(RUN), Vec::with_capacity(RUN));
        for run in list
            .chunk_by(|one, next| one.1 == next.1)
            .flat_map(|run| run.chunks(RUN))
        {
            let place = run[0].1;
            let (x, ups) = (self.tokens.get(self.job.list[place]), self.outputs(place));
            gates.clear();
            downs.clear();
            for i in at..at + run.len() {
                let (halves, next) = (halves(i), halves(i + run.len()));
                rows::announce(next);
                let [gate, down] = [0, 1].map(|half| Term {
                    half: halves[half],
                    next: next[half],
                    factor: 0.0,
                });
                gates.push(gate);
                downs.push(down);
            }
            let (mut factors, mut own) = ([0.0; RUN], [0.0; RUN]);
            let factors = &mut factors[..run.len()];
            rows::dot(self.isa, width, &gates, x, factors);
            for ((factor, own), &(channel, _)) in factors.iter_mut().zip(&mut own).zip(run) {
                if let Ups::Refining { gates: coarse, .. } = self.layer.ups {
                    *factor += coarse[self.pairs[place] * rows + channel];
                }
                *own = ups[channel];
            }
            gated(self.isa, factors, &own);
            values.extend_from_slice(factors);
            for (term, factor) in downs.iter_mut().zip(factors) {
                term.factor = *factor;
            }
            let sums = &mut sums[(place - task.places.start) * part..][..part];
            rows::add(self.isa, width, &downs, sums);
            at += run.len();
        }
    }

    /// Keeps the values of a unit's channels if the caller wants them; skipped channels are zero.
    fn keep(
        &self,
        unit: usize,
        places: Range<usize>,
        channels: Range<usize>,
        list: &[(usize, usize)],
        values: &[f32],
    ) {
        let Some(inner) = &self.inner else { return };
        let mut all = vec![0.0; places.len() * channels.len()];
        for (&(channel, place), &value) in list.iter().zip(values) {
            all[(place - places.start) * channels.len() + channel - channels.start] = value;
        }
        // SAFETY: a place belongs to one task, and the blocks of a task have disjoint channels.
        unsafe { inner.fill(unit, places, channels, &all) }
    }

    /// Some columns of a token's output.
    fn sum(&self, token: usize, columns: Range<usize>) -> Vec<f32> {
        let (mut sum, mut output) = (vec![0.0; columns.len()], vec![0.0; columns.len()]);
        for &(place, weight) in &self.terms[token] {
            output.fill(0.0);
            for number in 0..self.blocks / self.merged {
                let from = place * self.parts.rows() + number * self.part() + columns.start;
                add(&mut output, &self.parts.values()[from..]);
            }
            sum.iter_mut()
                .zip(&output)
                .for_each(|(sum, value)| *sum += weight * value);
        }
        sum
    }
}

/// Adds to sums.
fn add(sums: &mut [f32], values: &[f32]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
