//! Tests of the formats through the crate's public interface: golden tensors, damaged ones, and round trips.
//!
//! They are one program, because each program of tests is linked with the whole crate.

mod damage;
mod golden;
mod roundtrip;
