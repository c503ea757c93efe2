//! Compensated tensors as projections for [`crate::gemm::layer`].

use std::ops::Range;
use std::sync::Arc;

use super::scalar::Coefficients;
use super::{TOGETHER, TOKENS, kernel};
use crate::Result;
use crate::formats::compensated::View;
use crate::formats::compensated::chunk::CHUNK;
use crate::gemm::groupwise::Groupwise;
use crate::gemm::layer::{Job, Kernel, Products, Projection, Shared, Slots, Task, Work, direct, followed};
use crate::simd::Isa;
use crate::types::{Activations, Mode, Shape};

/// Multiplications per unit of the second stage: some 20 microseconds.
const UNIT_PRODUCTS: usize = 1 << 17;
/// The bytes of a run's activations, which stay in the second-level cache during a pass over the rows of V.
const RUN_BYTES: usize = 256 << 10;

/// A compensated tensor with the mode of its group-wise part and an instruction set.
#[derive(Debug, Clone)]
pub struct Compensated<'a> {
    view: View<'a>,
    base: Groupwise<'a>,
    isa: Isa,
}

impl<'a> Compensated<'a> {
    /// Products in `mode` with `isa`; the compensator always multiplies f32 activations.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error) if a group-wise tensor has no such mode or the processor lacks the
    /// instruction set.
    pub fn new(view: View<'a>, mode: Mode, isa: Isa) -> Result<Compensated<'a>> {
        Ok(Compensated {
            base: Groupwise::new(*view.base(), mode, isa)?,
            isa: isa.vectors(),
            view,
        })
    }
}

impl Projection for Compensated<'_> {
    fn shape(&self) -> Shape {
        self.base.shape()
    }

    /// The bytes of the codes; the compensator adds a few percent.
    fn row_bytes(&self) -> usize {
        self.base.row_bytes()
    }

    fn memory(&self, expert: usize, rows: Range<usize>) -> &[u8] {
        self.base.memory(expert, rows)
    }

    /// Units start at chunks of U^T, which also start blocks of 16 rows.
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

/// The prepared data of a job for the compensator.
pub struct Factors {
    /// For each task, the rank of its expert and the range of its units.
    tasks: Vec<(usize, Range<usize>)>,
    runs: Vec<Run>,
    /// The activations of each run, with each token padded to whole chunks.
    x: Slots<Vec<f32>>,
    units: Vec<Unit>,
    /// Each unit's products, rows of V x tokens of the run.
    z: Slots<Vec<f32>>,
}

/// Some tokens of a task whose expert has a compensator, counted from the task's first.
struct Run {
    task: usize,
    tokens: Range<usize>,
}

/// Some rows of V with a run.
struct Unit {
    run: usize,
    ranks: Range<usize>,
}

impl Factors {
    /// Plans the runs and units for tasks of experts with `rank(expert)` and tokens of `width` values.
    fn new(tasks: &[Task], width: usize, rank: impl Fn(usize) -> usize) -> Factors {
        let (mut runs, mut units) = (Vec::new(), Vec::new());
        let longest = RUN_BYTES / (size_of::<f32>() * width).max(1);
        let longest = longest.next_multiple_of(TOGETHER).max(TOGETHER);
        let tasks = tasks.iter().enumerate().map(|(number, task)| {
            let (rank, tokens, first) = (rank(task.expert), task.places.len(), units.len());
            for start in (0..tokens).step_by(longest).filter(|_| rank > 0) {
                let tokens = start..(start + longest).min(tokens);
                let step = (UNIT_PRODUCTS / (width * tokens.len()).max(1)).max(1);
                let run = runs.len();
                runs.push(Run { task: number, tokens });
                units.extend((0..rank).step_by(step).map(|start| Unit {
                    run,
                    ranks: start..rank.min(start + step),
                }));
            }
            (rank, first..units.len())
        });
        let tasks = tasks.collect();
        Factors {
            tasks,
            x: Slots::new(runs.len()),
            runs,
            z: Slots::new(units.len()),
            units,
        }
    }

    /// Gathers the coefficients of a task of `tokens` tokens, rank x tokens.
    fn gather(&self, task: usize, tokens: usize, z: &mut Vec<f32>) {
        let (rank, units) = self.tasks[task].clone();
        z.clear();
        z.resize(rank * tokens, 0.0);
        for unit in units {
            let Unit { run, ranks } = &self.units[unit];
            let run = &self.runs[*run].tokens;
            for (rank, part) in ranks.clone().zip(self.z.get(unit).chunks_exact(run.len())) {
                z[rank * tokens..][run.clone()].copy_from_slice(part);
            }
        }
    }
}

/// The coefficients z of a task, rank x tokens, which a thread assembles from units.
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
        let rank = |expert| self.view.rank(expert);
        Shared::own(Factors::new(&job.tasks, self.width(), rank))
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
        let (ranks, _) = factors.tasks[work.task];
        if ranks == 0 || rows.is_empty() {
            return;
        }
        if gathered.task.replace(work.task) != Some(work.task) {
            factors.gather(work.task, work.places().len(), &mut gathered.z);
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
    /// The columns, padded to whole chunks.
    fn width(&self) -> usize {
        self.shape().columns.next_multiple_of(CHUNK)
    }

    /// Widens the activations of a run to f32.
    fn gather(&self, job: &Job, factors: &Factors, run: usize, x: Activations) {
        let (columns, width) = (self.shape().columns, self.width());
        let Run { task, tokens } = &factors.runs[run];
        let list = &job.list[job.tasks[*task].places.clone()][tokens.clone()];
        factors.x.fill(run, || {
            let mut out = vec![0.0; list.len() * width];
            for (token, out) in list.iter().zip(out.chunks_exact_mut(width)) {
                x.widen(token * columns, &mut out[..columns]);
            }
            out
        });
    }

    /// Multiplies a unit's rows of V with its run.
    fn project(&self, job: &Job, factors: &Factors, unit: usize) {
        let Unit { run, ranks } = &factors.units[unit];
        let (Run { task, tokens }, x) = (&factors.runs[*run], factors.x.get(*run));
        factors.z.fill(unit, || {
            let mut z = vec![0.0; ranks.len() * tokens.len()];
            for (index, z) in ranks.clone().zip(z.chunks_exact_mut(tokens.len())) {
                let row = self.view.right(job.tasks[*task].expert, index);
                kernel::project(self.isa, &row, x, z);
            }
            z
        });
    }
}
