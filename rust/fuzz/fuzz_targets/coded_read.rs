//! Arbitrary bytes as an entropy-coded group-wise tensor: everything that reads them returns, whatever they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::coded_groupwise::Coded;
use moepack_core::formats::groupwise::View;
use moepack_core::gemm::groupwise::{Groupwise, MODES};
use moepack_core::gemm::matmul;
use moepack_core::simd::Isa;
use moepack_core::{Error, pool};

/// Larger tensors only cost time: one of no columns stands for billions of rows in no bytes.
const MAX_SIZE: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let pool = pool::current()?;
    let tensor = Coded::parse(data)?;
    let shape = tensor.layout().shape();
    if shape.experts.saturating_mul(shape.rows).max(shape.columns) > MAX_SIZE {
        return Ok(());
    }
    let view = tensor.view(data)?;
    let verified = view.verify(&pool);
    let plain = view.expand(&pool)?;
    let parsed = View::parse(&plain)?;
    assert!(verified.is_err() || parsed.verify(&pool).is_ok());
    if shape.experts > 0 {
        let x = vec![1.0f32; 3 * shape.columns];
        for mode in MODES {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let (mut y, mut wanted) = (vec![0.0; 3 * shape.rows], vec![0.0; 3 * shape.rows]);
                matmul(&Groupwise::new(view, mode, isa)?, shape.experts - 1, &x[..], 3, &mut y, &pool)?;
                matmul(&Groupwise::new(parsed, mode, isa)?, shape.experts - 1, &x[..], 3, &mut wanted, &pool)?;
                assert!(y.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }
    verified
}
