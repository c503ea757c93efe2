//! Compensated tensors as [`crate::gemm::layer`] multiplies them.

use std::ops::Range;
use std::sync::Arc;

use super::scalar::Coefficients;
use super::{TOKENS, kernel};
use crate::Result;
use crate::formats::compensated::View;
use crate::formats::compensated::chunk::CHUNK;
use crate::formats::groupwise;
use crate::gemm::groupwise::Groupwise;
use crate::gemm::layer::{Job, Kernel, Products, Projection, Shared, Slots, Work, direct, followed};
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// Products of a weight and an activation that a unit of the second stage is worth: some 20 microseconds.
const UNIT_PRODUCTS: usize = 1 << 17;

/// A compensated tensor with the mode of its group-wise part and an instruction set.
#[derive(Debug, Clone)]
pub struct Compensated<'a> {
    view: View<'a>,
    base: Groupwise<groupwise::View<'a>>,
    isa: Isa,
}

impl<'a> Compensated<'a> {
    /// Products in `mode` with `isa`; the compensator always multiplies f32 activations.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error): there is no such mode (those of a group-wise tensor), or the processor
    /// lacks the instruction set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Compensated<'a>> {
        Ok(Compensated {
            base: Groupwise::new(*view.base(), mode, isa)?,
            isa: isa.require()?,
            view,
        })
    }
}

impl Projection for Compensated<'_> {
    fn shape(&self) -> Shape {
        self.base.shape()
    }

    /// The bytes of the codes: the compensator is a few percent more.
    fn row_bytes(&self) -> usize {
        self.base.row_bytes()
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        self.base.memory(expert, rows)
    }

    /// Units start where chunks of U^T do, which is also where blocks of 16 rows do.
    fn granule(&self) -> usize {
        CHUNK
    }

    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's> {
        let base = self.base.products(job);
        match job.tasks.iter().any(|task| self.view.rank(task.expert) > 0) {
            true => followed(base, direct(self, job)),
            false => base,
        }
    }
}

/// What the compensator needs of a job.
pub struct Factors {
    /// For each task, the rank of its expert and its units.
    tasks: Vec<(usize, Range<usize>)>,
    /// The activations of each task's tokens, each padded to whole chunks.
    x: Slots<Vec<f32>>,
    /// Some rows of V of a task's expert: the task, and which rows.
    units: Vec<(usize, Range<usize>)>,
    /// Each unit's products with the task's tokens, rows of V x tokens.
    z: Slots<Vec<f32>>,
}

/// The coefficients z of a task, rank x tokens, which a thread puts together from units.
#[derive(Default)]
pub struct Gathered {
    task: Option<usize>,
    z: Vec<f32>,
}

/// The compensator: y += U (V x).
impl Kernel for Compensated<'_> {
    type Prepared = Factors;
    type Scratch<'w>
        = Gathered
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<Factors> {
        let (mut tasks, mut units) = (Vec::with_capacity(job.tasks.len()), Vec::new());
        for (number, task) in job.tasks.iter().enumerate() {
            let (rank, first) = (self.view.rank(task.expert), units.len());
            let step = (UNIT_PRODUCTS / (self.width() * task.places.len()).max(1)).max(1);
            let starts = (0..rank).step_by(step);
            units.extend(starts.map(|start| (number, start..rank.min(start + step))));
            tasks.push((rank, first..units.len()));
        }
        Shared::own(Factors {
            x: Slots::new(tasks.len()),
            z: Slots::new(units.len()),
            tasks,
            units,
        })
    }

    fn stages(&self, factors: &Factors) -> [usize; 2] {
        [factors.x.len(), factors.z.len()]
    }

    fn prepare(&self, job: &Job, factors: &Factors, stage: usize, unit: usize, x: Activations) {
        match stage {
            0 => self.gather(job, factors, unit, x),
            _ => self.project(job, factors, unit),
        }
    }

    fn multiply(
        &self,
        work: Work<'_, Factors>,
        gathered: &mut Gathered,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let factors = work.prepared;
        let (ranks, units) = factors.tasks[work.task].clone();
        if ranks == 0 || rows.is_empty() {
            return;
        }
        if gathered.task.replace(work.task) != Some(work.task) {
            gathered.z.clear();
            units.for_each(|unit| gathered.z.extend(factors.z.get(unit)));
        }
        let expert = work.expert();
        let left = |index: usize| self.view.left(expert, index);
        for (run, out) in out.chunks_mut(TOKENS * rows.len()).enumerate() {
            let coefficients = Coefficients {
                z: &gathered.z,
                ranks,
                stride: work.places().len(),
                first: run * TOKENS,
            };
            let tokens = out.len() / rows.len();
            kernel::expand(self.isa, &left, coefficients, tokens, rows.start / CHUNK, out);
        }
    }
}

impl Compensated<'_> {
    /// Columns of whole chunks.
    fn width(&self) -> usize {
        self.shape().columns.next_multiple_of(CHUNK)
    }

    fn gather(&self, job: &Job, factors: &Factors, task: usize, x: Activations) {
        if factors.tasks[task].0 == 0 {
            return;
        }
        let (columns, width) = (self.shape().columns, self.width());
        let tokens = &job.list[job.tasks[task].places.clone()];
        factors.x.fill(task, || {
            let mut out = vec![0.0; tokens.len() * width];
            for (token, out) in tokens.iter().zip(out.chunks_exact_mut(width)) {
                x.widen(token * columns, &mut out[..columns]);
            }
            out
        });
    }

    fn project(&self, job: &Job, factors: &Factors, unit: usize) {
        let (number, ranks) = factors.units[unit].clone();
        let (task, x) = (&job.tasks[number], factors.x.get(number));
        factors.z.fill(unit, || {
            let mut z = vec![0.0; ranks.len() * task.places.len()];
            for (index, z) in ranks.zip(z.chunks_exact_mut(task.places.len())) {
                kernel::project(self.isa, &self.view.right(task.expert, index), x, z);
            }
            z
        });
    }
}
