//! Arbitrary bytes as a packed codebook tensor: everything that reads them returns, whatever they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::codebook::View;
use moepack_core::gemm::codebook::{Codebook, MODES};
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::{Error, pool};

/// Larger tensors only cost time: one of no columns stands for billions of rows in no bytes.
const MAX_SIZE: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let pool = pool::current()?;
    let view = View::parse(data)?;
    let shape = view.layout().shape();
    if shape.experts.saturating_mul(shape.rows).max(shape.columns) > MAX_SIZE || shape.experts > MAX_SIZE {
        return Ok(());
    }
    let verified = view.verify();
    let (mut codes, mut values) = (vec![0; shape.columns], vec![0.0; shape.columns]);
    for row in 0..shape.experts * shape.rows {
        view.decode_row(row / shape.rows, row % shape.rows, &mut codes);
        view.decode_values(row / shape.rows, row % shape.rows, &mut values);
        assert!(codes.iter().all(|&code| usize::from(code) < view.layout().clusters()));
        assert!(verified.is_err() || values.iter().all(|value| !value.is_nan()));
    }
    // One token, a few, which share look-ups, and enough for panels.
    for tokens in [1, 7, 19] {
        let x = vec![1.0f32; tokens * shape.columns];
        let mut y = vec![0.0; tokens * shape.rows];
        let mut offsets = vec![0; shape.experts];
        offsets.push(if shape.experts == 0 { 0 } else { tokens });
        if shape.experts == 0 {
            return verified;
        }
        for (mode, bits) in MODES.into_iter().flat_map(|mode| [(mode, 8), (mode, 4)]) {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let weights = Codebook::with_activation_bits(view, mode, Some(bits), isa)?;
                matmul_grouped(&weights, &x[..], &offsets, &mut y, &pool)?;
            }
        }
    }
    verified
}
