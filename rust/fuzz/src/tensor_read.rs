//! Arbitrary bytes as a packed tensor of any format: everything that reads them returns.

use moepack_core::Error;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Floats, Numbers, Tensor};

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 16;

/// Verifies, decodes and multiplies.
pub fn run(data: &[u8]) {
    let _ = read(data);
}

/// The body of [`run`].
///
/// # Errors
/// The bytes are not a tensor, or verification fails.
pub fn read(data: &[u8]) -> Result<(), Error> {
    let tensor = tensor::open(data)?;
    let shape = tensor.shape();
    if !crate::is_small(shape, MAX_SIZE) {
        return Ok(());
    }
    let verified = tensor.verify(data, crate::pool());
    decode(&*tensor, data, shape.weights().unwrap_or(0), verified.is_ok())?;
    parameters(&*tensor, data)?;
    if shape.experts > 0 {
        multiply(&*tensor, data)?;
    }
    verified
}

/// Valid tensors decode to codes in range and to finite numbers.
fn decode(tensor: &dyn Tensor, data: &[u8], weights: usize, verified: bool) -> Result<(), Error> {
    let pool = crate::pool();
    let (mut codes, mut values, mut halves) = (vec![0; weights], vec![0.0; weights], vec![0; weights]);
    let decoded = tensor.decode(data, &mut codes, pool);
    let valued = tensor.dequantize(data, Floats::F32(&mut values), pool);
    let rounded = tensor.dequantize(data, Floats::Bf16(&mut halves), pool);
    assert!(valued.is_ok() == rounded.is_ok() && (valued.is_ok() || !verified));
    // Codes of any width may not fit a byte, and bf16 has none.
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
    for name in [
        "levels",
        "scales",
        "offsets",
        "centroids",
        "ranks",
        "right",
        "left",
        "thresholds",
    ] {
        if let Ok(found) = tensor.parameters(data, name, crate::pool()) {
            let count = match found.values {
                Numbers::F32(values) => values.len(),
                Numbers::I64(values) => values.len(),
            };
            assert_eq!(count, found.shape.iter().product::<usize>());
        }
    }
    Ok(())
}

/// Multiplies by the last expert: one token, a few, which share lookups, and enough for panels.
fn multiply(tensor: &dyn Tensor, data: &[u8]) -> Result<(), Error> {
    for tokens in [1, 7, 19] {
        let x = vec![1.0f32; tokens * tensor.shape().columns];
        for &mode in tensor.modes() {
            for isa in Isa::all_available() {
                for activation_bits in [None, Some(4)] {
                    crate::product(
                        tensor,
                        data,
                        &x,
                        tokens,
                        Compute {
                            mode,
                            activation_bits,
                            isa,
                        },
                    )?;
                }
            }
        }
    }
    Ok(())
}
