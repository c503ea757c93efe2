//! Types shared by all parts of the core: the shape of a tensor, activations, and compute modes.

mod activations;
mod mode;
mod shape;

pub use activations::Activations;
pub(crate) use activations::from_bf16;
pub use mode::Mode;
pub use shape::Shape;
