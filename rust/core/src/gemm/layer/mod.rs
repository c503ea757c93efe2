//! Products of packed experts with ragged numbers of tokens, and a whole layer of gated experts in one call:
//! y = sum over a token's experts of weight * down(silu(gate x) * up x).
//!
//! A format takes part by implementing three small traits: [`Projection`] (a tensor), [`Products`] (it and the tokens of
//! a call) and [`Worker`] (a thread's state in such products). Everything else lives here: routing, cutting rows into
//! units of work, gates, the weighted sum, and the one parallel region that goes through all of it, without putting a
//! thread to sleep in between. The three projections of a layer may be of different formats.
//!
//! A layer's phases: activations of gate and up (two stages), their products and gates, activations of down (two
//! stages), its products, the weighted sum. Each is units of work that any thread may do in any order, and each value is
//! computed by one unit: results do not depend on the number of threads.

mod activation;
mod output;
mod routing;
mod team;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use rayon::ThreadPool;

use self::output::Output;
use self::routing::Sorted;
use self::team::Region;
use super::ternary::Activations;
use crate::simd::Isa;
use crate::ternary::Shape;
use crate::{Error, Result};

pub use self::activation::gated;
pub use self::routing::{Job, Routing, Task};

/// A packed tensor of experts x rows x columns, with the mode and the instruction set that its products have.
pub trait Projection: Sync {
    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// Bytes that a row's product reads, about: how much a unit of work is worth.
    fn row_bytes(&self) -> usize;

    /// Rows that are stored together: units of work start at multiples.
    fn granule(&self) -> usize;

    /// Starts products by the tokens of a job. Nothing is computed here: this runs before the other threads wake.
    ///
    /// `sibling` is another matrix's products of the same job. Where its activations serve ([`Products::shared`]), they
    /// need not be made twice.
    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's>;
}

/// A tensor and the tokens of a call. What threads write goes into slots of their units (`OnceLock`, for example).
pub trait Products: Sync {
    /// Units of work of the two stages that make activations ready, as many as are worth sharing; 0 for nothing to do.
    /// The second stage starts when the first has ended, products start when the second has.
    fn stages(&self) -> [usize; 2];

    /// Does a unit of a stage. `x` are the activations, tokens of the job x columns.
    fn prepare(&self, stage: usize, unit: usize, x: Activations);

    /// Activations that a sibling may take over, to be recognized by their type; they are ready when this one's are.
    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// A thread's state, made by the thread after the stages.
    fn worker(&self) -> Box<dyn Worker + '_>;
}

/// A thread's buffers for products.
pub trait Worker {
    /// Computes some rows for all tokens of task `task`: `out` is tokens x rows. `rows` starts at a multiple of the
    /// granule and ends at one or at the last row. What a row becomes must not depend on which rows come with it.
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]);
}

/// Most bytes of a unit of work: long enough a run for the memory.
const UNIT_BYTES: usize = 256 << 10;
/// Units that each thread gets at least, where there are as many granules: the threads end at nearly the same time.
const UNITS: usize = 16;
/// Most outputs of a unit: they wait in the cache until they are put into place.
const UNIT_OUTPUTS: usize = 1 << 14;
/// As many rows are a unit even of many tokens, for tokens are read again for each unit.
const HIGH_ROWS: usize = 256;
/// Fewer bytes of weights than this are read by the calling thread: waking another takes as long.
const ALONE_BYTES: usize = 16 << 10;

/// How the rows of a job's tasks are cut into units.
struct Cut {
    step: usize,
    runs: usize,
    rows: usize,
}

impl Cut {
    fn new(projections: &[&dyn Projection], job: &Job, threads: usize) -> Cut {
        let rows = projections[0].shape().rows;
        let granule = projections
            .iter()
            .fold(1, |granule, p| multiple(granule, p.granule()));
        let bytes: usize = projections.iter().map(|p| p.row_bytes()).sum();
        let most = (UNIT_BYTES / bytes.max(1))
            .min((UNIT_OUTPUTS / job.widest().max(1)).max(HIGH_ROWS))
            .min(job.tasks.len() * rows / (UNITS * threads));
        let step = (most / granule).max(1) * granule;
        Cut {
            step,
            runs: rows.div_ceil(step),
            rows,
        }
    }

    fn units(&self, job: &Job) -> usize {
        job.tasks.len() * self.runs
    }

    /// The task and rows of a unit.
    fn at(&self, unit: usize) -> (usize, Range<usize>) {
        let first = unit % self.runs * self.step;
        (unit / self.runs, first..(first + self.step).min(self.rows))
    }
}

/// The least common multiple of two positive numbers.
fn multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

/// Whether a job is too small to wake threads for.
fn alone(projections: &[&dyn Projection], job: &Job) -> bool {
    let bytes = projections
        .iter()
        .map(|p| p.row_bytes().saturating_mul(p.shape().rows));
    bytes
        .fold(0, usize::saturating_add)
        .saturating_mul(job.list.len())
        < ALONE_BYTES
}

/// y = W x for the places of a job: `x` is the job's tokens x columns, `y` its places x rows. Sizes have been checked,
/// and every task's expert exists.
pub fn multiply(projection: &dyn Projection, job: Job, x: Activations, y: &mut [f32], pool: &ThreadPool) {
    if x.len() == 0 || y.is_empty() {
        return y.fill(0.0);
    }
    let job = Arc::new(job);
    let products = projection.products(&job, None);
    let cut = Cut::new(&[projection], &job, pool.current_num_threads());
    let [first, second] = products.stages();
    let output = Output::new(y, projection.shape().rows);
    let counts = [first, second, cut.units(&job)];
    Region::run(pool, &counts, alone(&[projection], &job), |region| {
        region.phase(0, |unit| products.prepare(0, unit, x));
        region.phase(1, |unit| products.prepare(1, unit, x));
        // SAFETY: nothing reads the output in this region.
        unsafe { rows_of(region, 2, &cut, &job, &*products, &output) }
    });
}

/// A phase of products that go into `output`.
///
/// # Safety
/// Nothing reads or writes `output` during the phase but what other threads do here.
unsafe fn rows_of(
    region: &Region,
    number: usize,
    cut: &Cut,
    job: &Job,
    products: &dyn Products,
    output: &Output,
) {
    let (mut worker, mut out) = (products.worker(), Vec::new());
    region.phase(number, |unit| {
        let (task, rows) = cut.at(unit);
        let places = job.tasks[task].places.clone();
        out.resize(places.len() * rows.len(), 0.0);
        worker.multiply(task, rows.clone(), &mut out);
        // SAFETY: this unit alone has these rows of this task, and a place is of one task; the caller excludes others.
        unsafe { place(output, places, rows, &out) }
    });
}

/// Puts `out`, tokens x rows, into place.
///
/// # Safety
/// As [`Output::write`].
unsafe fn place(output: &Output, places: Range<usize>, rows: Range<usize>, out: &[f32]) {
    for (place, values) in places.zip(out.chunks_exact(rows.len())) {
        // SAFETY: the caller's.
        unsafe { output.write(place, rows.clone(), values) }
    }
}

/// The projections of all experts of a layer: gate and up are E x I x H, down is E x H x I.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Gate projections.
    pub gate: &'a dyn Projection,
    /// Up projections.
    pub up: &'a dyn Projection,
    /// Down projections.
    pub down: &'a dyn Projection,
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
        isa: Isa,
        pool: &ThreadPool,
    ) -> Result<()> {
        let (x, vectors) = (x.into(), isa.require()?);
        self.check(&x, &routing, y)?;
        if x.len() == 0 || self.gate.shape().rows == 0 {
            y.fill(0.0);
            return Ok(());
        }
        self.run(x, routing, y, vectors, pool);
        Ok(())
    }

    fn run(&self, x: Activations, routing: Routing, y: &mut [f32], isa: Isa, pool: &ThreadPool) {
        let (shape, threads) = (self.gate.shape(), pool.current_num_threads());
        let tokens = x.len() / shape.columns;
        let Sorted { job, places } = Sorted::new(&routing, tokens, shape.experts);
        let own = Arc::new(Job::of_tasks(job.tasks.clone()));
        let job = Arc::new(job);
        let gate = self.gate.products(&job, None);
        let up = self.up.products(&job, Some(&*gate));
        let down = self.down.products(&own, None);
        let first = [gate.stages(), up.stages()];
        let last = down.stages();
        let cuts = [
            Cut::new(&[self.gate, self.up], &job, threads),
            Cut::new(&[self.down], &own, threads),
        ];
        let mut hidden = vec![0.0; job.list.len() * shape.rows];
        let mut outputs = vec![0.0; job.list.len() * shape.columns];
        let hidden = Output::new(&mut hidden, shape.rows);
        let outputs = Output::new(&mut outputs, shape.columns);
        let y = Output::new(y, shape.columns);
        let counts = [
            first[0][0] + first[1][0],
            first[0][1] + first[1][1],
            cuts[0].units(&job),
            last[0],
            last[1],
            cuts[1].units(&own),
            tokens,
        ];
        let alone = alone(&[self.gate, self.up, self.down], &job);
        Region::run(pool, &counts, alone, |region| {
            for (stage, units) in first[0].into_iter().enumerate() {
                region.phase(stage, |unit| match unit.checked_sub(units) {
                    None => gate.prepare(stage, unit, x),
                    Some(unit) => up.prepare(stage, unit, x),
                });
            }
            // SAFETY: nothing reads the hidden activations before the phase ends.
            unsafe { gates(region, 2, (&cuts[0], &job), [&*gate, &*up], &hidden, isa) };
            // SAFETY: they have been written, and are not again.
            let x = Activations::F32(unsafe { hidden.values() });
            region.phase(3, |unit| down.prepare(0, unit, x));
            region.phase(4, |unit| down.prepare(1, unit, x));
            // SAFETY: nothing reads the outputs before the phase ends.
            unsafe { rows_of(region, 5, &cuts[1], &own, &*down, &outputs) };
            let mut sum = vec![0.0; shape.columns];
            region.phase(6, |token| {
                // SAFETY: as above.
                weigh(token, &routing, &places, unsafe { outputs.values() }, &mut sum);
                // SAFETY: this unit alone has this token, and nothing reads `y` here.
                unsafe { y.write(token, 0..shape.columns, &sum) }
            });
        });
    }

    fn check(&self, x: &Activations, routing: &Routing, y: &[f32]) -> Result<()> {
        let [gate, up, down] = [self.gate, self.up, self.down].map(|projection| projection.shape());
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

/// The phase of gate and up: their products, gated, go into `hidden`.
///
/// # Safety
/// As [`rows_of`].
unsafe fn gates(
    region: &Region,
    number: usize,
    (cut, job): (&Cut, &Job),
    products: [&dyn Products; 2],
    hidden: &Output,
    isa: Isa,
) {
    let [mut gate, mut up] = products.map(|products| products.worker());
    let (mut values, mut factors) = (Vec::new(), Vec::new());
    region.phase(number, |unit| {
        let (task, rows) = cut.at(unit);
        let places = job.tasks[task].places.clone();
        values.resize(places.len() * rows.len(), 0.0);
        factors.resize(values.len(), 0.0);
        gate.multiply(task, rows.clone(), &mut values);
        up.multiply(task, rows.clone(), &mut factors);
        gated(isa, &mut values, &factors);
        // SAFETY: as in `rows_of`.
        unsafe { place(hidden, places, rows, &values) }
    });
}

/// Adds up a token's outputs.
fn weigh(token: usize, routing: &Routing, places: &[Option<usize>], outputs: &[f32], sum: &mut [f32]) {
    sum.fill(0.0);
    let pairs = token * routing.top_k..(token + 1) * routing.top_k;
    for (&place, weight) in places[pairs.clone()].iter().zip(&routing.weights[pairs]) {
        let Some(place) = place else { continue };
        let from = &outputs[place * sum.len()..][..sum.len()];
        sum.iter_mut()
            .zip(from)
            .for_each(|(sum, value)| *sum += weight * value);
    }
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
