//! Arbitrary bytes as a packed tensor of whatever format they name: everything that reads them returns, whatever they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Details, Floats, Numbers, Tensor};
use moepack_core::{Error, pool};

/// Larger tensors only cost time: a row of zeros takes no bytes, so a few bytes can stand for billions of weights.
const MAX_SIZE: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
});

fn read(data: &[u8]) -> Result<(), Error> {
    let (pool, tensor) = (pool::current()?, tensor::open(data)?);
    let shape = tensor.shape();
    assert!(tensor.bytes() == data.len() && shape.has_valid_ndim() && !tensor.name().is_empty());
    let sizes = [shape.all_rows(), shape.weights(), Some(shape.columns), Some(shape.experts)];
    if sizes.iter().any(|size| size.is_none_or(|size| size > MAX_SIZE)) {
        return Ok(());
    }
    let verified = tensor.verify(data, &pool);
    decode(&*tensor, data, shape.weights().unwrap_or(0), verified.is_ok())?;
    parameters(&*tensor, data)?;
    if shape.experts > 0 {
        multiply(&*tensor, data)?;
    }
    verified
}

/// What verifies also decodes, to codes of so many bits and to numbers.
fn decode(tensor: &dyn Tensor, data: &[u8], weights: usize, verified: bool) -> Result<(), Error> {
    let pool = pool::current()?;
    let (mut codes, mut values, mut halves) = (vec![0; weights], vec![0.0; weights], vec![0; weights]);
    let decoded = tensor.decode(data, &mut codes, &pool);
    let valued = tensor.dequantize(data, Floats::F32(&mut values), &pool);
    let rounded = tensor.dequantize(data, Floats::Bf16(&mut halves), &pool);
    assert!(valued.is_ok() == rounded.is_ok() && (valued.is_ok() || !verified));
    // Codes of any width need not fit a byte, and bf16 has none.
    let any_width = ["coded", "channels"].contains(&tensor.format().kind());
    assert!(decoded.is_ok() == valued.is_ok() || any_width);
    decoded?;
    match tensor.details().integer::<u32>("bits") {
        Ok(16) => unreachable!("bf16 has no codes"),
        Ok(bits) => assert!(codes.iter().all(|&code| u32::from(code) >> bits == 0)),
        Err(_) if any_width => (),
        Err(_) => assert!(codes.iter().all(|code| matches!(code, 0 | 1 | 255))),
    }
    assert!(!verified || values.iter().all(|value| !value.is_nan()));
    Ok(())
}

fn parameters(tensor: &dyn Tensor, data: &[u8]) -> Result<(), Error> {
    for name in ["levels", "scales", "offsets", "centroids", "ranks", "right", "left", "thresholds"] {
        if let Ok(found) = tensor.parameters(data, name, &*pool::current()?) {
            let count = match found.values {
                Numbers::F32(values) => values.len(),
                Numbers::I64(values) => values.len(),
            };
            assert_eq!(count, found.shape.iter().product::<usize>());
        }
    }
    let details: Details = tensor.details();
    if let Ok(bytes) = tensor.format().bytes(tensor.shape(), &details) {
        assert!(bytes >= tensor.bytes());
    }
    Ok(())
}

/// One token, a few, which share look-ups, and enough for panels, of the last expert.
fn multiply(tensor: &dyn Tensor, data: &[u8]) -> Result<(), Error> {
    let (shape, pool) = (tensor.shape(), pool::current()?);
    for tokens in [1, 7, 19] {
        let x = vec![1.0f32; tokens * shape.columns];
        let mut y = vec![0.0; tokens * shape.rows];
        let mut offsets = vec![0; shape.experts];
        offsets.push(tokens);
        for &mode in tensor.modes() {
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                for activation_bits in [None, Some(4)] {
                    let projection = tensor.projection(data, Compute { mode, activation_bits, isa })?;
                    matmul_grouped(&*projection, &x[..], &offsets, &mut y, &pool)?;
                }
            }
        }
    }
    Ok(())
}
