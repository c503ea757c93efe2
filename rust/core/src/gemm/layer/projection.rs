//! What the engine knows of a tensor, whatever its format.

use std::ops::Range;
use std::sync::Arc;

use super::routing::Job;
use crate::types::{Activations, Shape};

/// A packed tensor of experts x rows x columns, with the mode and the instruction set that its products have.
pub trait Projection: Send + Sync {
    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// Bytes that a row's product reads, about: how much a unit of work is worth.
    fn row_bytes(&self) -> usize;

    /// The bytes that products with some rows of an expert read first, to be prefetched; none where there is no telling.
    /// The rows start at a multiple of the granule and end at one or at the last row.
    fn memory(&self, _expert: usize, _rows: Range<usize>) -> &[u8] {
        &[]
    }

    /// Rows that are stored together: units of work start at multiples.
    fn granule(&self) -> usize;

    /// Starts products by the tokens of a job. Nothing is computed here: the other threads sleep or wait.
    fn products<'s>(&'s self, job: &Arc<Job>) -> Box<dyn Products + 's>;
}

/// A tensor and the tokens of a job.
pub trait Products: Send + Sync {
    /// Units of work of the two stages that make activations ready, as many as are worth sharing; 0 for nothing to do.
    /// The second stage starts when the first has ended, products start when the second has.
    fn stages(&self) -> [usize; 2];

    /// Does a unit of a stage. `x` are the activations, tokens of the job x columns.
    fn prepare(&self, stage: usize, unit: usize, x: Activations);

    /// A thread's state, made by the thread after the stages.
    fn worker(&self) -> Box<dyn Worker + '_>;
}

/// A thread's buffers for products.
pub trait Worker {
    /// Computes some rows for all tokens of task `task`: `out` is tokens x rows. `rows` starts at a multiple of the
    /// granule and ends at one or at the last row. What a row becomes must not depend on which other rows are computed with it.
    fn multiply(&mut self, task: usize, rows: Range<usize>, out: &mut [f32]);
}
