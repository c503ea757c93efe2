//! Compensated tensors as [`crate::gemm::layer`] multiplies them.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::TOKENS;
use super::kernel::{self, Coefficients};
use crate::Result;
use crate::formats::compensated::View;
use crate::formats::compensated::chunk::CHUNK;
use crate::formats::groupwise;
use crate::gemm::groupwise::Groupwise;
use crate::gemm::layer::{Job, Products, Projection, Worker};
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

    /// Those of the codes: the compensator is a few percent more.
    fn row_bytes(&self) -> usize {
        self.base.row_bytes()
    }

    /// Units start where chunks of U^T do, which is also where blocks of 16 rows do.
    fn granule(&self) -> usize {
        CHUNK
    }

    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's> {
        let (mut parts, mut units) = (Vec::with_capacity(job.tasks.len()), Vec::new());
        let width = self.shape().columns.next_multiple_of(CHUNK);
        for (number, task) in job.tasks.iter().enumerate() {
            let (rank, first) = (self.view.rank(task.expert), units.len());
            let step = (UNIT_PRODUCTS / (width * task.places.len()).max(1)).max(1);
            for start in (0..rank).step_by(step) {
                units.push(Unit {
                    task: number,
                    ranks: start..rank.min(start + step),
                    z: OnceLock::new(),
                });
            }
            parts.push(Part {
                rank,
                units: first..units.len(),
                x: OnceLock::new(),
            });
        }
        Box::new(Multiplication {
            weights: self,
            base: self.base.products(job, sibling),
            job: job.clone(),
            width,
            parts,
            units,
        })
    }
}

/// What the compensator of a task's expert needs.
struct Part {
    rank: usize,
    units: Range<usize>,
    /// The activations of its tokens, each padded to whole chunks.
    x: OnceLock<Vec<f32>>,
}

/// Some rows of V of a task's expert by its tokens.
struct Unit {
    task: usize,
    ranks: Range<usize>,
    /// Ranks x tokens.
    z: OnceLock<Vec<f32>>,
}

/// A tensor and the tokens of a job.
struct Multiplication<'a> {
    weights: &'a Compensated<'a>,
    base: Box<dyn Products + 'a>,
    job: Arc<Job>,
    width: usize,
    /// Of each task.
    parts: Vec<Part>,
    units: Vec<Unit>,
}

impl Multiplication<'_> {
    fn gather(&self, task: usize, x: Activations) {
        let part = &self.parts[task];
        let places = self.job.tasks[task].places.clone();
        if part.rank == 0 {
            return;
        }
        let columns = self.weights.shape().columns;
        let make = || {
            let mut out = vec![0.0; places.len() * self.width];
            for (place, out) in places.zip(out.chunks_exact_mut(self.width)) {
                x.widen(self.job.list[place] * columns, &mut out[..columns]);
            }
            out
        };
        part.x.get_or_init(make);
    }

    fn project(&self, unit: &Unit) {
        let task = &self.job.tasks[unit.task];
        let x = self.parts[unit.task]
            .x
            .get()
            .expect("the first stage has made it");
        let make = || {
            let mut z = vec![0.0; unit.ranks.len() * task.places.len()];
            for (index, z) in unit.ranks.clone().zip(z.chunks_exact_mut(task.places.len())) {
                kernel::project(
                    self.weights.isa,
                    &self.weights.view.right(task.expert, index),
                    x,
                    z,
                );
            }
            z
        };
        unit.z.get_or_init(make);
    }
}

impl Products for Multiplication<'_> {
    fn stages(&self) -> [usize; 2] {
        let [first, second] = self.base.stages();
        let gathered = if self.units.is_empty() {
            0
        } else {
            self.parts.len()
        };
        [first + gathered, second + self.units.len()]
    }

    fn prepare(&self, stage: usize, unit: usize, x: Activations) {
        let own = unit.checked_sub(self.base.stages()[stage]);
        match (own, stage) {
            (None, _) => self.base.prepare(stage, unit, x),
            (Some(task), 0) => self.gather(task, x),
            (Some(unit), _) => self.project(&self.units[unit]),
        }
    }

    /// Those of the group-wise part.
    fn shared(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.base.shared()
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Thread {
            products: self,
            base: self.base.worker(),
            task: None,
            z: Vec::new(),
        })
    }
}

struct Thread<'a> {
    products: &'a Multiplication<'a>,
    base: Box<dyn Worker + 'a>,
    /// Whose coefficients `z` are: ranks x tokens.
    task: Option<usize>,
    z: Vec<f32>,
}

impl Worker for Thread<'_> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        self.base.multiply(task, rows.clone(), out);
        let products = self.products;
        let part = &products.parts[task];
        if part.rank == 0 || rows.is_empty() {
            return;
        }
        if self.task != Some(task) {
            self.task = Some(task);
            self.z.clear();
            for unit in &products.units[part.units.clone()] {
                self.z.extend(unit.z.get().expect("the second stage has made it"));
            }
        }
        let of = &products.job.tasks[task];
        let left = |index: usize| products.weights.view.left(of.expert, index);
        for (run, out) in out.chunks_mut(TOKENS * rows.len()).enumerate() {
            let coefficients = Coefficients {
                z: &self.z,
                ranks: part.rank,
                stride: of.places.len(),
                first: run * TOKENS,
            };
            let tokens = out.len() / rows.len();
            kernel::expand(
                products.weights.isa,
                &left,
                coefficients,
                tokens,
                rows.start / CHUNK,
                out,
            );
        }
    }
}
