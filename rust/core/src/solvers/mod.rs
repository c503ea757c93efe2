//! Quantizers with inner loops that need Rust: they map values to codes, scales and centroids.

pub mod clustering;
pub mod fitting;
pub mod kmeans;
pub mod ladder;
pub mod priced;
pub mod samples;
pub mod trellis;
