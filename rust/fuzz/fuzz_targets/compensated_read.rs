//! Arbitrary bytes as a packed compensated tensor: everything that reads them returns, whatever they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::compensated::View;
use moepack_core::gemm::compensated::Compensated;
use moepack_core::gemm::groupwise::MODES;
use moepack_core::gemm::matmul;
use moepack_core::simd::Isa;
use moepack_core::{Error, pool};

/// Larger tensors only cost time: one of no columns stands for billions of rows in no bytes.
const MAX_SIZE: usize = 1 << 18;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let pool = pool::current()?;
    let view = View::parse(data)?;
    let shape = view.layout().shape();
    let rows = shape.experts.saturating_mul(shape.rows);
    if rows.max(shape.columns) > MAX_SIZE {
        return Ok(());
    }
    let verified = view.verify(&pool);
    let mut values = vec![0.0; shape.columns];
    for row in 0..rows {
        view.decode_values(row / shape.rows, row % shape.rows, &mut values);
    }
    if shape.experts > 0 {
        let x = vec![1.0f32; 3 * shape.columns];
        let mut y = vec![0.0; 3 * shape.rows];
        for mode in MODES {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let weights = Compensated::new(view.clone(), mode, isa)?;
                matmul(&weights, shape.experts - 1, &x[..], 3, &mut y, &pool)?;
            }
        }
    }
    verified
}
