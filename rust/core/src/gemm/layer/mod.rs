//! The product engine: packed experts with ragged numbers of tokens, and a whole layer of gated experts in one call:
//! y = sum over a token's experts of weight * down(silu(gate x) * up x).
//!
//! A tensor takes part as a [`Projection`]. A format implements [`Kernel`]: its layout of activations, the
//! preparation of a unit of them, and the inner loop; [`direct`] turns a kernel into [`Products`]. Projections of a
//! job with the same layout share activations ([`Cache`]). The rest is common to all formats: routing, dividing rows
//! into units of work, gates, the weighted sum, and the parallel region ([`region`]) that runs all phases without
//! putting threads to sleep in between. The three projections of a layer may be of different formats.
//!
//! The phases of a layer are: activations of gate and up (two stages), their products and gates, activations of down
//! (two stages), its products, and the weighted sum; for many tokens the last two are one phase ([`bands`]). Phases
//! consist of units of work that any thread may compute in any order, and each value is computed by one unit, so
//! results do not depend on the number of threads.

mod activation;
mod bands;
mod cache;
mod compose;
pub(crate) mod cut;
pub(crate) mod experts;
mod kernel;
pub(crate) mod matrices;
pub(crate) mod output;
pub(crate) mod prefetch;
mod projection;
pub(crate) mod region;
pub(crate) mod routing;
mod slots;
#[cfg(test)]
mod tests;

pub use self::activation::{Gate, gated};
pub(crate) use self::activation::{exp, sigmoid};
pub use self::cache::{Cache, Shared};
pub use self::compose::{by_tokens, followed};
pub use self::experts::{Biases, Layer};
pub use self::kernel::{Kernel, Work, direct};
pub use self::matrices::multiply;
pub use self::projection::{Products, Projection, Worker};
pub use self::routing::{Job, Routing, Task};
pub use self::slots::Slots;
