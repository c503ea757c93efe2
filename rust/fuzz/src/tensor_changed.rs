//! A tensor whose bytes change after it was opened, as in a mapped file that is written to: readers return or panic,
//! and never read out of bounds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moepack_core::Error;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Floats};

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 14;

/// Reads a tensor whose bytes changed. The first eight bytes seed the change; the rest is the tensor.
pub fn run(data: &[u8]) {
    let _ = read(data);
}

fn read(data: &[u8]) -> Result<(), Error> {
    let Some((&seed, data)) = data.split_first_chunk::<8>() else {
        return Ok(());
    };
    let tensor = tensor::open(data)?;
    let shape = tensor.shape();
    if shape.experts == 0 || !crate::is_small(shape, MAX_SIZE) {
        return Ok(());
    }
    let changed = changed(data, u64::from_le_bytes(seed));
    let _ = catch_unwind(AssertUnwindSafe(|| tensor.verify(&changed, crate::pool())));
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let mut values = vec![0.0; shape.weights().unwrap_or(0)];
        tensor.dequantize(&changed, Floats::F32(&mut values), crate::pool())
    }));
    for tokens in [1, 19] {
        let x = vec![1.0f32; tokens * shape.columns];
        for &mode in tensor.modes() {
            for isa in Isa::all_available() {
                let compute = Compute {
                    mode,
                    activation_bits: None,
                    isa,
                };
                let _ = catch_unwind(AssertUnwindSafe(|| {
                    crate::product(&*tensor, &changed, &x, tokens, compute)
                }));
            }
        }
    }
    Ok(())
}

/// The bytes with an eighth of them, or a single one, overwritten.
fn changed(data: &[u8], seed: u64) -> Vec<u8> {
    let (mut bytes, mut state) = (data.to_vec(), seed | 1);
    let count = if seed & 2 == 0 { 1 } else { bytes.len() / 8 };
    for _ in 0..count {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let place = (state >> 33) as usize % bytes.len();
        bytes[place] = (state >> 25) as u8;
    }
    bytes
}
