//! Arbitrary bytes as a valid tensor: the kernels of every instruction set agree with the scalar ones, which agree
//! with the dequantized values.

use moepack_core::Error;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Array, Compute, Floats, Numbers};
use moepack_core::types::{Mode, Shape};

/// Larger tensors only cost time.
const MAX_SIZE: usize = 1 << 14;

/// Larger numbers overflow sums, for which orders of summation differ by more than rounding.
const MAX_VALUE: f32 = 1e6;

/// Multiplies by valid tensors, in all modes and on all instruction sets.
pub fn run(data: &[u8]) {
    let _ = read(data);
}

/// The body of [`run`].
///
/// # Errors
/// The bytes are not a tensor, or verification fails.
pub fn read(data: &[u8]) -> Result<(), Error> {
    let (pool, tensor) = (crate::pool(), tensor::open(data)?);
    let shape = tensor.shape();
    if !crate::is_small(shape, MAX_SIZE) {
        return Ok(());
    }
    tensor.verify(data, pool)?;
    let mut values = vec![0.0; shape.weights().unwrap_or(0)];
    tensor.dequantize(data, Floats::F32(&mut values), pool)?;
    if shape.experts == 0 || values.iter().any(|value| value.abs() > MAX_VALUE) {
        return Ok(());
    }
    // Products multiply activations by column scales, which must neither overflow nor vanish.
    if let Ok(Array {
        values: Numbers::F32(scales),
        ..
    }) = tensor.parameters(data, "columns", pool)
    {
        let ordinary = (1.0 / MAX_VALUE)..=MAX_VALUE;
        if scales
            .iter()
            .any(|scale| *scale != 0.0 && !ordinary.contains(&scale.abs()))
        {
            return Ok(());
        }
    }
    let last = &values[(shape.experts - 1) * shape.rows * shape.columns..];
    for tokens in [1, 5, 19] {
        let x: Vec<f32> = (0..tokens * shape.columns).map(activation).collect();
        let (exact, sums) = reference(last, &x, tokens, shape);
        for &mode in tensor.modes() {
            let product = |isa| {
                let compute = Compute {
                    mode,
                    activation_bits: None,
                    isa,
                };
                crate::product(&*tensor, data, &x, tokens, compute)
            };
            let scalar = product(Isa::SCALAR)?;
            if mode == Mode::Exact {
                check(&scalar, &exact, &sums, 1e-4);
            }
            for isa in Isa::all_available() {
                check(&product(isa)?, &scalar, &sums, tolerance(mode));
            }
        }
    }
    Ok(())
}

/// Activations that all modes represent exactly or nearly so.
fn activation(i: usize) -> f32 {
    (i * 37 % 17) as f32 / 8.0 - 1.0
}

/// The tolerance between two orders of summation, relative to the sum of all magnitudes.
fn tolerance(mode: Mode) -> f32 {
    match mode {
        Mode::Exact => 1e-4,
        _ => 2e-2,
    }
}

/// The products of an expert in f64, and the sums of the magnitudes of their terms.
fn reference(values: &[f32], x: &[f32], tokens: usize, shape: Shape) -> (Vec<f32>, Vec<f32>) {
    let Shape { rows, columns, .. } = shape;
    let mut found = (Vec::new(), Vec::new());
    for token in 0..tokens {
        for row in 0..rows {
            let weights = &values[row * columns..][..columns];
            let terms = weights
                .iter()
                .zip(&x[token * columns..])
                .map(|(&w, &x)| f64::from(w) * f64::from(x));
            found.0.push(terms.clone().sum::<f64>() as f32);
            found.1.push(terms.map(f64::abs).sum::<f64>() as f32);
        }
    }
    found
}

fn check(found: &[f32], expected: &[f32], sums: &[f32], tolerance: f32) {
    for ((found, expected), sum) in found.iter().zip(expected).zip(sums) {
        assert!(
            (found - expected).abs() <= tolerance * sum + 1e-6,
            "{found} instead of {expected}, of {sum}"
        );
    }
}
