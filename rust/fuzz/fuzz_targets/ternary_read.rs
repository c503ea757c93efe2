//! Arbitrary bytes as a packed ternary tensor: everything that reads them returns, whatever they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::formats::ternary::{self, TernaryView};
use moepack_core::gemm::matmul;
use moepack_core::gemm::ternary::Ternary;
use moepack_core::simd::Isa;
use moepack_core::types::Mode;
use moepack_core::{Error, pool};

/// Larger tensors only cost time: a row of zeros takes no bytes, so a few bytes can stand for billions of weights.
const MAX_WEIGHTS: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let pool = pool::current()?;
    let view = TernaryView::parse(data)?;
    let verified = view.verify(&pool);
    let Some(weights) = view.shape().weights().filter(|&weights| weights <= MAX_WEIGHTS) else { return verified };
    let decoded = ternary::decode_codes(&view, &mut vec![0; weights], &pool);
    let valued = ternary::decode_values_bf16(&view, &mut vec![0; weights], &pool);
    assert_eq!(decoded.is_ok(), valued.is_ok());
    assert!(decoded.is_ok() || verified.is_err());
    if view.columns() <= MAX_WEIGHTS && view.rows() <= MAX_WEIGHTS && view.experts() > 0 {
        let x = vec![1.0f32; view.columns()];
        let mut y = vec![0.0; view.rows()];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            matmul(&Ternary::new(view.clone(), Mode::Auto, isa)?, 0, &x[..], 1, &mut y, &pool)?;
        }
    }
    verified
}
