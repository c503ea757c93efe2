//! FSV8, a finite-state variable-to-fixed code: every byte stands for a string of ternary weights.
//!
//! A word is a string and a promise: it stands for the string and may promise that the next d weights are not all zero.
//! The promise of a word is the state of the code after it, and the words of each state form a complete parse of the
//! rows that keep the state's promise, so that exactly one word fits. A decoder finds the state in the top bits of the
//! previous code (its *class*), so it needs one table look-up a code and no bit pointer. A row starts in state 0, which
//! promises nothing, whatever byte precedes it. It is parsed as if infinitely many zeros followed: the last word may
//! extend beyond the row's end and always leads to state 0.
//!
//! Promises bring the code within 1-2 % of the entropy with 256 words: the next weight alone has the probabilities
//! .885/.115 of being zero or not, but a promise can be chosen that holds with a probability near one half.

pub mod dictionary;
pub mod encoder;
pub mod lut;
pub mod search;

pub use dictionary::{COUNT, Dictionary, Word};
pub use encoder::Encoder;
pub use lut::Lut;

/// The end of a row's list of non-zeros: a position that no row reaches.
pub const SENTINEL: u32 = u32::MAX;
