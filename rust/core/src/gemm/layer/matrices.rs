//! Matrices times the same tokens: two phases that make activations ready, one of products.

use std::sync::Arc;

use rayon::ThreadPool;

use super::ahead::{self, Ahead};
use super::cut::{self, Cut};
use super::output::Output;
use super::team::{self, Member, Threads};
use super::{Job, Products, Projection};
use crate::types::Activations;

/// Phases of [`Matrices::multiply`].
pub(crate) const PHASES: usize = 3;

/// One of them.
struct Matrix<'a> {
    projection: &'a dyn Projection,
    products: Box<dyn Products + 'a>,
    cut: Cut,
    y: Output<'a>,
}

/// Matrices and the tokens of a job, to be multiplied once.
pub(crate) struct Matrices<'a> {
    list: Vec<Matrix<'a>>,
    job: Arc<Job>,
}

impl<'a> Matrices<'a> {
    /// Products that go into arrays of their own.
    pub fn new(projections: &[&'a dyn Projection], job: &Arc<Job>, threads: usize) -> Matrices<'a> {
        let output = |projection: &dyn Projection, units| {
            Output::owned(job.list.len(), projection.shape().rows, units)
        };
        let mut list: Vec<Matrix> = Vec::with_capacity(projections.len());
        for &projection in projections {
            let sibling = list.first().map(|matrix| &*matrix.products as &dyn Products);
            let products = projection.products(job, sibling);
            let cut = Cut::new(&[projection], job, threads);
            let y = output(projection, cut.units(job));
            list.push(Matrix {
                projection,
                products,
                cut,
                y,
            });
        }
        Matrices {
            list,
            job: job.clone(),
        }
    }

    /// One matrix, whose products go into `y`, the job's places x rows.
    fn into(projection: &'a dyn Projection, job: Job, y: &'a mut [f32], threads: usize) -> Matrices<'a> {
        let job = Arc::new(job);
        let cut = Cut::new(&[projection], &job, threads);
        let matrix = Matrix {
            projection,
            products: projection.products(&job, None),
            y: Output::new(y, projection.shape().rows, cut.units(&job)),
            cut,
        };
        Matrices {
            list: vec![matrix],
            job,
        }
    }

    /// The memory that each of `threads` threads reads first.
    pub fn ahead(&self, threads: usize) -> Ahead<'a> {
        let counts = self.list.iter().map(|matrix| matrix.cut.units(&self.job));
        Ahead::new(counts.clone().sum(), threads, |unit| {
            let (index, unit) = split(counts.clone(), unit);
            let matrix = &self.list[index];
            ahead::memory(&[matrix.projection], &self.job, &matrix.cut, unit)
        })
    }

    /// Multiplies, as a member of a region: `x` is the job's tokens x columns. What is in `next` is needed afterwards.
    pub fn multiply<'s>(&self, member: &mut Member<'_, 's>, x: Activations, next: Option<&'s Ahead<'s>>) {
        for stage in 0..2 {
            let counts = self.list.iter().map(|matrix| matrix.products.stages()[stage]);
            member.phase(counts.clone().sum(), |unit| {
                let (index, unit) = split(counts.clone(), unit);
                self.list[index].products.prepare(stage, unit, x);
            });
        }
        let counts = self.list.iter().map(|matrix| matrix.cut.units(&self.job));
        let mut workers: Vec<_> = self.list.iter().map(|matrix| matrix.products.worker()).collect();
        let mut out = Vec::new();
        member.expect(next);
        member.phase(counts.clone().sum(), |unit| {
            let (index, unit) = split(counts.clone(), unit);
            let matrix = &self.list[index];
            let (task, rows) = matrix.cut.at(unit);
            let places = self.job.tasks[task].places.clone();
            out.resize(places.len() * rows.len(), 0.0);
            workers[index].multiply(task, rows.clone(), &mut out);
            // SAFETY: a place is of one task, and the units of a task have rows of their own.
            unsafe { matrix.y.fill(unit, places, rows, &out) }
        });
    }

    /// What a matrix's products are, places x rows, once they have been computed.
    pub fn values(&self, index: usize) -> &[f32] {
        self.list[index].y.values()
    }
}

/// Which of some lists a number falls into that counts through all of them, and its number there.
fn split(counts: impl Iterator<Item = usize>, mut number: usize) -> (usize, usize) {
    for (index, count) in counts.enumerate() {
        match number.checked_sub(count) {
            None => return (index, number),
            Some(rest) => number = rest,
        }
    }
    unreachable!("the number is below the sum of the counts")
}

/// y = W x for the places of a job: `x` is the job's tokens x columns, `y` its places x rows. Sizes have been checked,
/// and every task's expert exists.
pub fn multiply(projection: &dyn Projection, job: Job, x: Activations, y: &mut [f32], pool: &ThreadPool) {
    if x.len() == 0 || y.is_empty() {
        return y.fill(0.0);
    }
    let threads = Threads::of(cut::alone(&[projection], &job), job.list.len());
    let matrices = Matrices::into(projection, job, y, pool.current_num_threads());
    team::run(pool, PHASES, threads, |member| {
        matrices.multiply(member, x, None);
    });
}
