//! Experts of which only some channels are computed (FloE, equation 11 and algorithm 1): y = sum over a token's experts of
//! weight * sum over channels c of [|u_c| >= t] * silu(gate_c x) * u_c * down_c, with u = up x and a threshold t an expert.
//!
//! The up projection may be of any format; gate and down come as records of channels ([`crate::formats::channels`]), and a
//! record that no token of a call wants is never touched. A wanted one is read once, whatever the number of tokens: its first
//! half gives the gate, its second half is added to the outputs. Who has decided already gives the outputs u, zero where a
//! channel is skipped: records that are read from a drive must be known before they are multiplied. Where coarse copies of
//! all projections compute a first approximation, records may hold what finer weights add to them ([`Ups::Refining`]).
//!
//! A call is one parallel region: the up projection, channels, the sum over blocks of channels. A unit of work of the second
//! phase is a block of an expert's channels for all of its tokens. How many blocks there are depends on sizes alone, each
//! adds its channels in ascending order, and blocks are added in theirs, at once where a thread computes all of an expert's:
//! results do not depend on the number of threads.
//! Nothing is fused, so every instruction set gives the same bits (given those of the up projection).
//!
//! # Bounds
//! With u = 2^-24 and n columns a product of a gate's row is within (n / 64 + 12) u sum |w x| of the exact one; of a row of
//! 4 bits, an activation is also off by at most 2 u of the largest of its group ([`nibbles`]).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod layer;
mod nibbles;
mod projection;
mod rows;
#[cfg(test)]
mod tests;

pub use layer::{Layer, Ups};
pub use projection::{MODES, Records};
