//! Products by compensated weights: y = Wq x + U (V x), directly from the packed compensator.
//!
//! A tensor is a [`Projection`](super::layer::Projection): alone or in a layer of gated experts, a call is one
//! parallel region. In addition to the preparation of the group-wise part, the first stage gathers runs of each
//! task's activations in whole chunks, and the second computes z = V x, where a unit is a few rows of V with one run.
//! A unit of rows then computes the group-wise product and y += U z. Rows of V and U^T are unpacked 64 values at a
//! time for all tokens that share them. Each z and each y is summed by one unit in a fixed order, so results depend
//! neither on the number of threads nor on the instruction set.
//!
//! Accuracy: z is a sum of C products in eight lanes, then y a sum of r; with u = 2^-24 and S the sum over ranks and
//! columns of |u v x|, the error of the compensator's part is at most (C / 8 + r + 16) u S.
//!
//! Scales and codes are not checked: any bytes give a number (possibly NaN) and no out-of-bounds access.

mod kernel;
mod projection;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use projection::Compensated;

/// Tokens that share an unpacked chunk of U^T.
const TOKENS: usize = 32;
/// Tokens that share an unpacked chunk of V.
const TOGETHER: usize = 4;

#[cfg(test)]
mod tests;
