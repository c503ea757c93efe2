//! FSV8, a finite-state variable-to-fixed code: every byte stands for a string of ternary weights.
//!
//! A word is a string and a promise: it stands for the string and may promise that the next d weights are not all
//! zero. The promise of a word is the state of the code after it, and the words of each state form a complete parse
//! of the rows that keep the state's promise, so that exactly one word fits. A decoder finds the state in the top
//! bits of the previous code (its *class*), so it needs one table lookup per code and no bit pointer. A row starts in
//! state 0, which promises nothing, regardless of the previous byte. It is parsed as if infinitely many zeros
//! followed: the last word may extend beyond the row's end and always leads to state 0.
//!
//! With 256 words, promises bring the code within 1-2 % of the entropy: a single weight is zero or not with
//! probabilities .885/.115, but a promise can be chosen to hold with a probability near one half.

pub mod dictionary;
pub mod encoder;
pub mod lut;

pub use dictionary::{COUNT, Dictionary, Word};
pub use encoder::Encoder;
pub use lut::Lut;

/// The end of a row's list of non-zeros: a position beyond every row.
pub const SENTINEL: u32 = u32::MAX;
