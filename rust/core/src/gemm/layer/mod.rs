//! The engine of all products: packed experts with ragged numbers of tokens, and a whole layer of gated experts in one
//! call: y = sum over a token's experts of weight * down(silu(gate x) * up x).
//!
//! A format takes part as a [`Projection`]. What its room says of its products is a [`Kernel`]: the layout that it
//! wants activations in, how a unit of them is made, and the inner loop; [`direct`] turns that into [`Products`].
//! Projections of a job that want the same layout share it ([`Cache`]). Everything else lives here: routing, cutting rows into
//! units of work, gates, the weighted sum, and the one parallel region ([`region`]) that goes through all of it, without
//! putting a thread to sleep in between. The three projections of a layer may be of different formats.
//!
//! A layer's phases: activations of gate and up (two stages), their products and gates, activations of down (two
//! stages), its products, the weighted sum, or of many tokens both at once ([`bands`]). Each is units of work that any
//! thread may do in any order, and each value is computed by one unit: results do not depend on the number of threads.

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
