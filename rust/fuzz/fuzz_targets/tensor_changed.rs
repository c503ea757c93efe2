//! A tensor whose bytes change after it was opened, as in a mapped file that somebody writes to: readers return, or stop
//! by a panic, and never leave the bytes.

#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Floats, Tensor};
use moepack_core::{Error, pool};

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 16;

static QUIET: Once = Once::new();

fuzz_target!(|data: &[u8]| {
    // Panics are expected here; the fuzzer's own hook would end the process.
    QUIET.call_once(|| set_hook(Box::new(|_| ())));
    let _ = read(data);
});

/// The first eight bytes say how the rest is changed; the rest is the tensor.
fn read(data: &[u8]) -> Result<(), Error> {
    let Some((&seed, data)) = data.split_first_chunk::<8>() else {
        return Ok(());
    };
    let tensor = tensor::open(data)?;
    let shape = tensor.shape();
    let sizes = [shape.all_rows(), shape.weights(), Some(shape.columns), Some(shape.experts)];
    if shape.experts == 0 || sizes.iter().any(|size| size.is_none_or(|size| size > MAX_SIZE)) {
        return Ok(());
    }
    let changed = changed(data, u64::from_le_bytes(seed));
    let _ = catch_unwind(AssertUnwindSafe(|| tensor.verify(&changed, &*pool::current()?)));
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let mut values = vec![0.0; shape.weights().unwrap_or(0)];
        tensor.dequantize(&changed, Floats::F32(&mut values), &*pool::current()?)
    }));
    for tokens in [1, 19] {
        for &mode in tensor.modes() {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let compute = Compute { mode, activation_bits: None, isa };
                let _ = catch_unwind(AssertUnwindSafe(|| multiply(&*tensor, &changed, compute, tokens)));
            }
        }
    }
    Ok(())
}

/// The bytes with an eighth of them, or one, overwritten.
fn changed(data: &[u8], seed: u64) -> Vec<u8> {
    let (mut bytes, mut state) = (data.to_vec(), seed | 1);
    let count = if seed & 2 == 0 { 1 } else { bytes.len() / 8 };
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = (state >> 33) as usize % bytes.len();
        bytes[place] = (state >> 25) as u8;
    }
    bytes
}

fn multiply(tensor: &dyn Tensor, data: &[u8], compute: Compute, tokens: usize) -> Result<(), Error> {
    let shape = tensor.shape();
    let x = vec![1.0f32; tokens * shape.columns];
    let (mut y, mut offsets) = (vec![0.0; tokens * shape.rows], vec![0; shape.experts]);
    offsets.push(tokens);
    matmul_grouped(&*tensor.projection(data, compute)?, &x[..], &offsets, &mut y, &*pool::current()?)
}
