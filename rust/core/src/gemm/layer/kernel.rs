//! Products of a format from what its room says of them.

use std::ops::Range;
use std::sync::Arc;

use super::cache::Shared;
use super::projection::{Products, Worker};
use super::routing::Job;
use crate::types::Activations;

/// How a format multiplies: a layout of activations, and the inner loop over packed rows.
pub trait Kernel: Sync {
    /// The activations of a job in the kernel's layout. Threads fill them unit by unit ([`super::Slots`]).
    type Prepared: Send + Sync;

    /// What a thread keeps from unit to unit.
    type Scratch<'w>: Default
    where
        Self: 'w;

    /// The job's activations, to be filled: from a static [`super::Cache`], by a key that says all they depend on beside
    /// the job, so that other projections share them.
    fn prepared(&self, job: &Arc<Job>) -> Shared<Self::Prepared>;

    /// Units of work of the two stages that fill them; see [`Products::stages`].
    fn stages(&self, prepared: &Self::Prepared) -> [usize; 2];

    /// Does a unit of a stage. `x` are the activations, tokens of the job x columns.
    fn prepare(&self, job: &Job, prepared: &Self::Prepared, stage: usize, unit: usize, x: Activations);

    /// Computes some rows for all tokens of a task; see [`Worker::multiply`].
    fn multiply<'w>(
        &'w self,
        work: Work<'w, Self::Prepared>,
        scratch: &mut Self::Scratch<'w>,
        rows: Range<usize>,
        out: &mut [f32],
    );
}

/// A task of a job whose activations have been prepared.
#[derive(Debug)]
pub struct Work<'w, P> {
    /// The job.
    pub job: &'w Job,
    /// Its activations.
    pub prepared: &'w P,
    /// The number of the task.
    pub task: usize,
}

impl<'w, P> Work<'w, P> {
    /// The task's expert.
    pub fn expert(&self) -> usize {
        self.job.tasks[self.task].expert
    }

    /// The job's places that the task has.
    pub fn places(&self) -> Range<usize> {
        self.job.tasks[self.task].places.clone()
    }

    /// For each of its places, which token of the job is there.
    pub fn tokens(&self) -> &'w [usize] {
        &self.job.list[self.places()]
    }
}

/// The products of a kernel with a job.
pub fn direct<'s, K: Kernel + Send + 's>(kernel: K, job: &Arc<Job>) -> Box<dyn Products + 's> {
    Box::new(Direct {
        shared: kernel.prepared(job),
        kernel,
        job: job.clone(),
    })
}

struct Direct<K: Kernel> {
    kernel: K,
    job: Arc<Job>,
    shared: Shared<K::Prepared>,
}

impl<K: Kernel + Send> Products for Direct<K> {
    fn stages(&self) -> [usize; 2] {
        match self.shared.borrowed {
            true => [0, 0],
            false => self.kernel.stages(&self.shared.prepared),
        }
    }

    fn prepare(&self, stage: usize, unit: usize, x: Activations) {
        self.kernel
            .prepare(&self.job, &self.shared.prepared, stage, unit, x);
    }

    fn worker(&self) -> Box<dyn Worker + '_> {
        Box::new(Thread {
            products: self,
            scratch: Default::default(),
        })
    }
}

struct Thread<'w, K: Kernel> {
    products: &'w Direct<K>,
    scratch: K::Scratch<'w>,
}

impl<K: Kernel> Worker for Thread<'_, K> {
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]) {
        let Direct { kernel, job, shared } = self.products;
        let prepared = &*shared.prepared;
        kernel.multiply(Work { job, prepared, task }, &mut self.scratch, rows, out);
    }
}

impl<K: Kernel + ?Sized> Kernel for &K {
    type Prepared = K::Prepared;
    type Scratch<'w>
        = K::Scratch<'w>
    where
        Self: 'w;

    fn prepared(&self, job: &Arc<Job>) -> Shared<K::Prepared> {
        (**self).prepared(job)
    }

    fn stages(&self, prepared: &K::Prepared) -> [usize; 2] {
        (**self).stages(prepared)
    }

    fn prepare(&self, job: &Job, prepared: &K::Prepared, stage: usize, unit: usize, x: Activations) {
        (**self).prepare(job, prepared, stage, unit, x);
    }

    fn multiply<'w>(
        &'w self,
        work: Work<'w, K::Prepared>,
        scratch: &mut K::Scratch<'w>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        (**self).multiply(work, scratch, rows, out);
    }
}
