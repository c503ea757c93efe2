//! FSV8, a finite-state variable-to-fixed code: every byte stands for a string of ternary weights.
//!
//! A word is (string, promise): it stands for the string and may promise that the next d weights are not all zero.
//! The promise of a word is the state of the code after it, and the words of each state form a complete parse of the
//! rows that keep the state's promise, so that exactly one word fits. The state is read from the top bits of the code
//! before (its *class*), so a decoder needs one table look-up a code and no bit pointer. A row starts in state 0,
//! which promises nothing, whatever byte precedes it. It is parsed as if infinitely many zeros followed: the last
//! word may run past the row's end and always leads to state 0.
//!
//! Promises are why this comes within 1-2 % of the entropy with 256 words: a set of strings splits the probabilities
//! .885/.115 of the next weight, a promise can be chosen to split them near one half.

pub mod dictionary;
pub mod encoder;
pub mod lut;
pub mod search;

pub use dictionary::{COUNT, Dictionary, Word};
pub use encoder::Encoder;
pub use lut::Lut;

/// The end of a row's list of non-zeros: a position that no row reaches.
pub const SENTINEL: u32 = u32::MAX;
