//! A layer of experts, of which each token computes the channels that pass its threshold.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::ThreadPool;

use super::projection::filled_up;
use super::rows;
use crate::formats::channels::{GROUP, View};
use crate::gemm::layer::cut::{self, Cut};
use crate::gemm::layer::output::Output;
use crate::gemm::layer::region::{self, Thread, Threads};
use crate::gemm::layer::routing::Sorted;
use crate::gemm::layer::{Job, Products, Projection, Routing, Slots, gated};
use crate::simd::Isa;
use crate::types::{Activations, Shape};
use crate::{Error, Result};

/// Blocks of an expert's channels, at most: enough for the threads, few enough that adding them up costs little.
const BLOCKS: usize = 32;
/// Fewest channels of a block.
const LEAST_CHANNELS: usize = 64;
/// Bytes of all blocks' outputs, at most, unless one an expert and token is more.
const BLOCK_BYTES: usize = 64 << 20;
/// Columns that a unit of the last phase adds up.
const BAND: usize = 1024;

/// The projections of a layer: up is E x I x H, the records of gate and down are E x I x 2 H.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Up projections, which decide.
    pub up: &'a dyn Projection,
    /// Gate rows, down columns and thresholds.
    pub channels: View<'a>,
}

impl Layer<'_> {
    /// Computes the layer: `x` and `y` are T x H. The terms of a token are added in the order of its experts' list.
    ///
    /// Returns how many channels were computed, over all tokens and their experts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: sizes do not match, or the processor lacks the instruction set.
    pub fn forward<'a>(
        &self,
        x: impl Into<Activations<'a>>,
        routing: Routing,
        y: &mut [f32],
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<u64> {
        let (x, isa) = (x.into(), isa.require()?);
        self.check()?;
        let Shape { columns, .. } = self.up.shape();
        routing.check(columns, &x, y)?;
        if x.len() == 0 {
            return Ok(0);
        }
        let pass = Pass::new(
            *self,
            &routing,
            x.len() / columns,
            pool.current_num_threads(),
            isa,
        );
        let bands = columns.div_ceil(BAND);
        let y = Output::new(y, columns, pass.tokens.len() * bands);
        let threads = Threads::of(cut::alone(&[self.up], &pass.job), pass.tokens.len());
        region::run(pool, threads, |thread| {
            pass.ups(thread, x);
            pass.channels(thread);
            thread.phase(pass.tokens.len() * bands, |unit| {
                let (token, first) = (unit / bands, unit % bands * BAND);
                let band = first..(first + BAND).min(columns);
                // SAFETY: each unit has a token and columns of its own.
                unsafe { y.fill(unit, token..token + 1, band.clone(), &pass.sum(token, band)) }
            });
        });
        Ok(pass.computed.into_inner())
    }

    /// Says whether the two fit together.
    fn check(&self) -> Result<()> {
        let (up, records) = (self.up.shape(), self.channels.layout().shape());
        match (up.experts, up.rows, 2 * up.columns) == (records.experts, records.rows, records.columns) {
            true => Ok(()),
            false => Err(Error::InvalidArgument(format!(
                "up and channels do not fit: {up:?}, {records:?}"
            ))),
        }
    }
}

/// A layer and the tokens of a call, to be computed once.
struct Pass<'a> {
    layer: Layer<'a>,
    up: Box<dyn Products + 'a>,
    job: Arc<Job>,
    cut: Cut,
    /// The tokens in f32, filled up to whole groups.
    tokens: Slots<Vec<f32>>,
    /// Outputs of the up projection, places x channels.
    ups: Output<'a>,
    /// Channels of a block, and blocks of an expert.
    step: usize,
    blocks: usize,
    /// Outputs of all blocks, places x (blocks x filled up columns).
    parts: Output<'a>,
    /// For each token, its experts' places and weights.
    terms: Vec<Vec<(usize, f32)>>,
    computed: AtomicU64,
    isa: Isa,
}

impl<'a> Pass<'a> {
    fn new(layer: Layer<'a>, routing: &Routing, tokens: usize, threads: usize, isa: Isa) -> Pass<'a> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = layer.up.shape();
        let Sorted { job, places } = Sorted::new(routing, tokens, experts);
        let job = Arc::new(job);
        let cut = Cut::new(&[layer.up], &job, threads);
        let part = columns.next_multiple_of(GROUP);
        let most = (BLOCK_BYTES / (4 * part * job.list.len()).max(1)).clamp(1, BLOCKS);
        let step = rows.div_ceil(most).max(LEAST_CHANNELS);
        let blocks = rows.div_ceil(step);
        let pairs = places.into_iter().zip(routing.weights).collect::<Vec<_>>();
        let terms = pairs.chunks(routing.top_k.max(1));
        let placed = |pairs: &[(Option<usize>, &f32)]| {
            pairs
                .iter()
                .filter_map(|(place, weight)| Some(((*place)?, **weight)))
                .collect()
        };
        Pass {
            up: layer.up.products(&job),
            tokens: Slots::new(tokens),
            ups: Output::owned(job.list.len(), rows, cut.units(&job)),
            parts: Output::owned(job.list.len(), blocks * part, job.tasks.len() * blocks),
            terms: terms.map(placed).collect(),
            computed: AtomicU64::new(0),
            layer,
            job,
            cut,
            step,
            blocks,
            isa,
        }
    }

    /// The phases of the up projection.
    fn ups(&self, thread: &mut Thread, x: Activations) {
        let columns = self.layer.up.shape().columns;
        for stage in 0..2 {
            let units = self.up.stages()[stage];
            let tokens = if stage == 0 { self.tokens.len() } else { 0 };
            thread.phase(units + tokens, |unit| match unit.checked_sub(units) {
                None => self.up.prepare(stage, unit, x),
                Some(token) => self.tokens.fill(token, || filled_up(x, token * columns, columns)),
            });
        }
        let (mut up, mut values) = (self.up.worker(), Vec::new());
        thread.phase(self.cut.units(&self.job), |unit| {
            let (task, rows) = self.cut.at(unit);
            let places = self.job.tasks[task].places.clone();
            values.resize(places.len() * rows.len(), 0.0);
            up.multiply(task, rows.clone(), &mut values);
            // SAFETY: a place is of one task, and the units of a task have rows of their own.
            unsafe { self.ups.fill(unit, places, rows, &values) }
        });
    }

    /// The phase of the channels.
    fn channels(&self, thread: &mut Thread) {
        let part = self.part();
        let (mut list, mut sums) = (Vec::new(), Vec::new());
        thread.phase(self.job.tasks.len() * self.blocks, |unit| {
            let (task, block) = (unit / self.blocks, unit % self.blocks);
            let places = self.job.tasks[task].places.clone();
            let rows = self.layer.up.shape().rows;
            self.wanted(
                task,
                block * self.step..((block + 1) * self.step).min(rows),
                &mut list,
            );
            sums.clear();
            sums.resize(places.len() * part, 0.0);
            self.block(task, &list, &mut sums);
            self.computed.fetch_add(list.len() as u64, Ordering::Relaxed);
            // SAFETY: a place is of one task, and the blocks of a task have columns of their own.
            unsafe {
                self.parts
                    .fill(unit, places, block * part..(block + 1) * part, &sums)
            }
        });
    }

    /// Columns of a part: those of an output, filled up.
    fn part(&self) -> usize {
        self.layer.up.shape().columns.next_multiple_of(GROUP)
    }

    /// The pairs of a channel and a place whose output of the up projection is not below the threshold, by channels: what is
    /// no number passes, so that it reaches the output.
    fn wanted(&self, task: usize, channels: Range<usize>, list: &mut Vec<(usize, usize)>) {
        let (task, rows) = (&self.job.tasks[task], self.layer.up.shape().rows);
        let (ups, threshold) = (self.ups.values(), self.layer.channels.threshold(task.expert));
        list.clear();
        for channel in channels {
            let passes = |place: &usize| {
                let up = ups[place * rows + channel];
                up.abs() >= threshold || up.is_nan()
            };
            let above = task.places.clone().filter(passes);
            list.extend(above.map(|place| (channel, place)));
        }
    }

    /// Adds the channels of a list to the sums of the task's places.
    fn block(&self, task: usize, list: &[(usize, usize)], sums: &mut [f32]) {
        let (task, rows, part) = (&self.job.tasks[task], self.layer.up.shape().rows, self.part());
        let (channels, ups) = (&self.layer.channels, self.ups.values());
        let width = channels.layout().width();
        let record = |channel: usize| task.expert * rows + channel;
        for (number, &(channel, place)) in list.iter().enumerate() {
            let [gate, down] = channels.halves(record(channel));
            let [next_gate, next_down] =
                channels.halves(record(list.get(number + 1).map_or(channel, |pair| pair.0)));
            let x = self.tokens.get(self.job.list[place]);
            let mut value = [rows::dot(self.isa, width, gate, next_gate, x)];
            gated(self.isa, &mut value, &ups[place * rows + channel..][..1]);
            let sums = &mut sums[(place - task.places.start) * part..][..part];
            rows::add(self.isa, width, down, next_down, value[0], sums);
        }
    }

    /// Some columns of a token's output.
    fn sum(&self, token: usize, columns: Range<usize>) -> Vec<f32> {
        let (mut sum, mut output) = (vec![0.0; columns.len()], vec![0.0; columns.len()]);
        for &(place, weight) in &self.terms[token] {
            output.fill(0.0);
            for block in 0..self.blocks {
                let from = (place * self.blocks + block) * self.part() + columns.start;
                let values = &self.parts.values()[from..][..columns.len()];
                output
                    .iter_mut()
                    .zip(values)
                    .for_each(|(sum, value)| *sum += value);
            }
            sum.iter_mut()
                .zip(&output)
                .for_each(|(sum, value)| *sum += weight * value);
        }
        sum
    }
}
