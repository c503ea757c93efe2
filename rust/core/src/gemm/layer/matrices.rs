//! Several matrices times the same tokens: two phases that prepare activations, and one of products.

use std::sync::Arc;

use rayon::ThreadPool;

use super::cut::{self, Cut};
use super::output::Output;
use super::prefetch::{self, Prefetch};
use super::projection::{Products, Projection};
use super::region::{self, Thread, Threads};
use super::routing::Job;
use crate::types::Activations;

/// One of the matrices.
struct Matrix<'a> {
    projection: &'a dyn Projection,
    products: Box<dyn Products + 'a>,
    cut: Cut,
    y: Output<'a>,
}

impl<'a> Matrix<'a> {
    /// Products written to `y`, or to a new array.
    fn new(
        projection: &'a dyn Projection,
        job: &Arc<Job>,
        y: Option<&'a mut [f32]>,
        threads: usize,
    ) -> Matrix<'a> {
        let cut = Cut::new(&[projection], job, threads);
        let (rows, units) = (projection.shape().rows, cut.units(job));
        Matrix {
            projection,
            products: projection.products(job),
            y: match y {
                Some(y) => Output::new(y, rows, units),
                None => Output::owned(job.list.len(), rows, units),
            },
            cut,
        }
    }
}

/// Matrices and the tokens of a job, for a single multiplication.
pub(crate) struct Matrices<'a> {
    list: Vec<Matrix<'a>>,
    job: Arc<Job>,
}

impl<'a> Matrices<'a> {
    /// Products written to new arrays.
    pub fn new(projections: &[&'a dyn Projection], job: Job, threads: usize) -> Matrices<'a> {
        let job = Arc::new(job);
        let list = projections
            .iter()
            .map(|&projection| Matrix::new(projection, &job, None, threads));
        Matrices {
            list: list.collect(),
            job,
        }
    }

    /// A single matrix, whose products are written to `y`, the job's places x rows.
    fn into(projection: &'a dyn Projection, job: Job, y: &'a mut [f32], threads: usize) -> Matrices<'a> {
        let job = Arc::new(job);
        Matrices {
            list: vec![Matrix::new(projection, &job, Some(y), threads)],
            job,
        }
    }

    /// The memory that each of `threads` threads reads first.
    pub fn prefetch(&self, threads: usize) -> Prefetch<'a> {
        let counts = self.list.iter().map(|matrix| matrix.cut.units(&self.job));
        Prefetch::new(counts.clone().sum(), threads, |unit| {
            let (index, unit) = split(counts.clone(), unit);
            let matrix = &self.list[index];
            prefetch::memory(&[matrix.projection], &self.job, &matrix.cut, unit)
        })
    }

    /// Multiplies on a thread of a region: `x` is the job's tokens x columns. The memory of `next` is read
    /// afterwards.
    pub fn multiply<'s>(&self, thread: &mut Thread<'_, 's>, x: Activations, next: Option<&'s Prefetch<'s>>) {
        for stage in 0..2 {
            let counts = self.list.iter().map(|matrix| matrix.products.stages()[stage]);
            thread.phase(counts.clone().sum(), |unit| {
                let (index, unit) = split(counts.clone(), unit);
                self.list[index].products.prepare(stage, unit, x);
            });
        }
        let counts = self.list.iter().map(|matrix| matrix.cut.units(&self.job));
        let mut workers: Vec<_> = self.list.iter().map(|matrix| matrix.products.worker()).collect();
        let mut out = Vec::new();
        thread.prefetch(next);
        thread.phase(counts.clone().sum(), |unit| {
            let (index, unit) = split(counts.clone(), unit);
            let matrix = &self.list[index];
            let (task, rows) = matrix.cut.at(unit);
            let places = self.job.tasks[task].places.clone();
            out.resize(places.len() * rows.len(), 0.0);
            workers[index].multiply(task, rows.clone(), &mut out);
            // SAFETY: a place belongs to one task, and the units of a task have disjoint rows.
            unsafe { matrix.y.fill(unit, places, rows, &out) }
        });
    }

    /// The products of a matrix, places x rows, after they have been computed.
    pub fn values(&self, index: usize) -> &[f32] {
        self.list[index].y.values()
    }
}

/// Maps a number that counts through several lists to the index of the list and the index in it.
fn split(counts: impl Iterator<Item = usize>, mut number: usize) -> (usize, usize) {
    for (index, count) in counts.enumerate() {
        match number.checked_sub(count) {
            None => return (index, number),
            Some(rest) => number = rest,
        }
    }
    unreachable!("the number is below the sum of the counts")
}

/// Computes y = W x for the places of a job: `x` is the job's tokens x columns, `y` its places x rows. Sizes must
/// have been checked, and every task's expert must exist.
pub fn multiply(projection: &dyn Projection, job: Job, x: Activations, y: &mut [f32], pool: &ThreadPool) {
    if x.len() == 0 || y.is_empty() {
        return y.fill(0.0);
    }
    let threads = Threads::of(cut::alone(&[projection], &job), job.list.len());
    let matrices = Matrices::into(projection, job, y, pool.current_num_threads());
    region::run(pool, threads, |thread| {
        matrices.multiply(thread, x, None);
    });
}
