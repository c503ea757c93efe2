//! Multiplies a packed tensor with one thread, for programs that count instructions.
//!
//! ```text
//! cargo run --release -p moepack-tools --bin product FILE MODE TOKENS REPETITIONS
//! ```
//!
//! `FILE` holds a packed tensor of one matrix. The instruction set is the best one, or the one of `MOEPACK_ISA`.

use std::error::Error;
use std::hint::black_box;

use moepack_core::gemm::matmul;
use moepack_core::tensor::{self, Compute};
use moepack_core::types::Mode;
use moepack_core::{pool, simd};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, mode, tokens, repetitions] = arguments.as_slice() else {
        return Err("usage: product FILE MODE TOKENS REPETITIONS".into());
    };
    pool::set_threads(1)?;
    let (pool, data) = (pool::current()?, std::fs::read(file)?);
    let (tensor, tokens): (_, usize) = (tensor::open(&data)?, tokens.parse()?);
    let compute = Compute {
        mode: Mode::from_name(mode)?,
        activation_bits: None,
        isa: simd::active()?,
    };
    let (shape, weights) = (tensor.shape(), tensor.projection(&data, compute)?);
    let x: Vec<f32> = (0..tokens * shape.columns)
        .map(|i| (i % 61) as f32 - 30.0)
        .collect();
    let mut y = vec![0.0; tokens * shape.rows];
    for _ in 0..repetitions.parse()? {
        matmul(&*weights, 0, black_box(&x[..]), tokens, &mut y, &pool)?;
    }
    black_box(y);
    Ok(())
}
