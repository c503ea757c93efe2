//! Types that every part of the core shares: the shape of a tensor, activations, and how a product computes.

mod activations;
mod mode;
mod shape;

pub use activations::Activations;
pub(crate) use activations::from_bf16;
pub use mode::Mode;
pub use shape::Shape;
