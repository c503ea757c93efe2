//! Experts with sparsely computed channels (FloE, equation 11 and algorithm 1): y = sum over a token's experts of
//! weight * sum over channels c of [|u_c| >= t] * silu(gate_c x) * u_c * down_c, with u = up x and a threshold t per
//! expert.
//!
//! The up projection may be of any format; gate and down are stored as records of channels
//! ([`crate::formats::channels`]), and a record that no token of a call needs is never touched. A needed record is
//! read once for all tokens: its first half gives the gate, and its second half is added to the outputs. Callers that
//! have already selected channels pass the outputs u, with zero for skipped channels: records read from a drive must
//! be known before they are multiplied. If coarse copies of all projections compute a first approximation, records
//! may hold the differences of finer weights ([`Ups::Refining`]).
//!
//! A call is one parallel region: the up projection, channels, the sum over blocks of channels. A unit of work of the
//! second phase is a block of an expert's channels for all of its tokens. The number of blocks depends only on sizes,
//! each adds its channels in ascending order, and blocks are added in ascending order (immediately if one thread
//! computes all blocks of an expert), so results do not depend on the number of threads. Operations are not fused, so
//! every instruction set gives the same bits (given those of the up projection).
//!
//! # Bounds
//! With u = 2^-24 and n columns, the error of a gate row's product is at most (n / 64 + 12) u sum |w x|; for 4-bit
//! rows, the error of an activation is in addition at most 2 u of the largest of its group ([`nibbles`]).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod layer;
mod nibbles;
mod pair;
mod projection;
mod rows;
mod term;
#[cfg(test)]
mod tests;
mod token;

pub use layer::{Layer, Ups};
pub use projection::{MODES, Records};
