//! Adapts a format's kernel to the product engine.

use std::ops::Range;
use std::sync::Arc;

use super::cache::Shared;
use super::projection::{Products, Worker};
use super::routing::Job;
use crate::types::Activations;

/// A format's products: a layout of activations, and the inner loop over packed rows.
pub trait Kernel: Sync {
    /// The activations of a job in the kernel's layout. Threads fill them unit by unit ([`super::Slots`]).
    type Prepared: Send + Sync;

    /// The buffers that a thread reuses for all units.
    type Scratch<'w>: Default
    where
        Self: 'w;

    /// Returns the job's activations, to be filled. They come from a static [`super::Cache`], with a key of
    /// everything they depend on besides the job, so that projections can share them.
    fn prepared(&self, job: &Arc<Job>) -> Shared<Self::Prepared>;

    /// The units of work of the two stages that fill the activations; see [`Products::stages`].
    fn stages(&self, prepared: &Self::Prepared) -> [usize; 2];

    /// Computes a unit of a stage. `x` holds the activations, tokens of the job x columns.
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
    /// Its prepared activations.
    pub prepared: &'w P,
    /// The index of the task.
    pub task: usize,
}

impl<'w, P> Work<'w, P> {
    /// The task's expert.
    pub fn expert(&self) -> usize {
        self.job.tasks[self.task].expert
    }

    /// The places of the task in the job.
    pub fn places(&self) -> Range<usize> {
        self.job.tasks[self.task].places.clone()
    }

    /// The token of the job at each of the task's places.
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
