//! Products of packed experts with ragged numbers of tokens, and a whole layer of gated experts in one call:
//! y = sum over a token's experts of weight * down(silu(gate x) * up x).
//!
//! A format takes part by implementing three small traits: [`Projection`] (a tensor), [`Products`] (it and the tokens of
//! a call) and [`Worker`] (a thread's state in such products). Everything else lives here: routing, cutting rows into
//! units of work, gates, the weighted sum, and the one parallel region ([`team`]) that goes through all of it, without
//! putting a thread to sleep in between. The three projections of a layer may be of different formats.
//!
//! A layer's phases: activations of gate and up (two stages), their products and gates, activations of down (two
//! stages), its products, the weighted sum, or of many tokens both at once ([`bands`]). Each is units of work that any
//! thread may do in any order, and each value is computed by one unit: results do not depend on the number of threads.

mod activation;
pub(crate) mod ahead;
mod bands;
mod cut;
pub(crate) mod experts;
pub(crate) mod matrices;
mod output;
mod routing;
pub(crate) mod team;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::types::Activations;
use crate::types::Shape;

pub(crate) use self::activation::exp;
pub use self::activation::gated;
pub use self::experts::Layer;
pub use self::matrices::multiply;
pub use self::routing::{Job, Routing, Task};

/// A packed tensor of experts x rows x columns, with the mode and the instruction set that its products have.
pub trait Projection: Sync {
    /// Experts, rows and columns.
    fn shape(&self) -> Shape;

    /// Bytes that a row's product reads, about: how much a unit of work is worth.
    fn row_bytes(&self) -> usize;

    /// The bytes of an expert's rows, in their order and of one size each, to be fetched before they are read; none where
    /// it cannot say.
    fn memory(&self, _expert: usize) -> &[u8] {
        &[]
    }

    /// Rows that are stored together: units of work start at multiples.
    fn granule(&self) -> usize;

    /// Starts products by the tokens of a job. Nothing is computed here: the other threads sleep or wait.
    ///
    /// `sibling` is another matrix's products of the same job. Where its activations serve ([`Products::shared`]), they
    /// need not be made twice.
    fn products<'s>(&'s self, job: &Arc<Job>, sibling: Option<&dyn Products>) -> Box<dyn Products + 's>;
}

/// A tensor and the tokens of a call. What threads write goes into slots of their units (`OnceLock`, for example).
pub trait Products: Send + Sync {
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
