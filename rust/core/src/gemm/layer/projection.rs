//! The interface of the engine to tensors of any format.

use std::ops::Range;
use std::sync::Arc;

use super::routing::Job;
use crate::types::{Activations, Shape};

/// A packed tensor of experts x rows x columns with the mode and the instruction set of its products.
pub trait Projection: Send + Sync {
    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// The approximate bytes that a row's product reads, as the cost of a unit of work.
    fn row_bytes(&self) -> usize;

    /// The bytes that products with a range of an expert's rows read first, for prefetching; empty if unknown. The
    /// range starts at a multiple of the granule and ends at one or at the last row.
    fn memory(&self, _expert: usize, _rows: Range<usize>) -> &[u8] {
        &[]
    }

    /// The number of rows that are stored together: units of work start at multiples of it.
    fn granule(&self) -> usize;

    /// The rows of a unit from which products have about their full speed, a multiple of the granule.
    fn wide(&self) -> usize {
        self.granule()
    }

    /// Starts products with the tokens of a job. It must not compute anything, because the other threads are idle.
    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's>;
}

/// A tensor and the tokens of a job.
pub trait Products: Send + Sync {
    /// The units of work of the two stages that prepare activations; 0 if a stage is empty. The second stage starts
    /// after the first, and products start after the second.
    fn stages(&self) -> [usize; 2];

    /// Computes a unit of a stage. `x` holds the activations, tokens of the job x columns.
    fn prepare(&self, stage: usize, unit: usize, x: Activations);

    /// Creates a thread's state; each thread calls it after the stages.
    fn worker(&self) -> Box<dyn Worker + '_>;
}

/// A thread's buffers for products.
pub trait Worker {
    /// Computes a range of rows for all tokens of task `task`: `out` is tokens x rows. `rows` starts at a multiple of
    /// the granule and ends at one or at the last row. The result of a row must not depend on the other rows of the
    /// range.
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]);
}
