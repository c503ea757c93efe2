//! Products by compensated weights: y = Wq x + U (V x), the compensator read packed.
//!
//! A tensor is a [`Projection`](super::layer::Projection): alone or in a layer of gated experts, a call is one parallel region. Beside what the
//! group-wise part prepares, the first stage gathers runs of each task's activations in whole chunks, the second one is
//! z = V x, a few rows of V by a run a unit. A unit of rows is then the group-wise product and y += U z. Rows of V and U^T are unpacked 64
//! values at a time for tokens that share them. Each z and each y is summed by one unit in a fixed order, so
//! results depend neither on the number of threads nor on the instruction set.
//!
//! Accuracy: z is a sum of C products in eight lanes, then y a sum of r; with u = 2^-24 and S the sum over ranks and
//! columns of |u v x|, the error of the compensator's part is at most (C / 8 + r + 16) u S.
//!
//! Scales and codes are unchecked bytes: any of them gives a number (perhaps NaN) and no access out of bounds.

mod kernel;
mod projection;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::Compensated;

/// Tokens that share the unpacking of a chunk of U^T.
const TOKENS: usize = 32;
/// Tokens that share the unpacking of a chunk of V.
const TOGETHER: usize = 4;

#[cfg(test)]
mod tests;
