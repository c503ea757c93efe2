//! Matrix products by packed weights: y = W x without unpacking W.

pub mod ternary;
