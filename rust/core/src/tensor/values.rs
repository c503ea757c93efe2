//! The numeric outputs of packed tensors.

use half::bf16;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::formats::rows::{self, Named};
use crate::types::Shape;
use crate::{Error, Result};

/// The destination of dequantized values.
pub enum Floats<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values, rounded to nearest even.
    Bf16(&'a mut [u16]),
}

/// The values of an [`Array`].
#[derive(Debug, Clone, PartialEq)]
pub enum Numbers {
    /// Single precision.
    F32(Vec<f32>),
    /// Counts.
    I64(Vec<i64>),
}

/// Parameters of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// The length of each axis.
    pub shape: Vec<usize>,
    /// The values; their number is the product of the shape.
    pub values: Numbers,
}

impl Array {
    /// An array of single precision.
    pub fn floats(shape: &[usize], values: Vec<f32>) -> Array {
        Array {
            shape: shape.to_vec(),
            values: Numbers::F32(values),
        }
    }
}

/// Fills `out`, E x R x C values, row by row in parallel: `fill` gets the row's number, counted over all experts.
pub(super) fn fill_rows<T: Send>(
    shape: Shape,
    out: &mut [T],
    pool: &ThreadPool,
    fill: impl Fn(usize, &mut [T]) + Sync,
) -> Result<()> {
    if shape.weights() != Some(out.len()) {
        return Err(Error::InvalidArgument(format!(
            "the output has {} values for the weights of {shape:?}",
            out.len()
        )));
    }
    let rows = out.par_chunks_exact_mut(shape.columns.max(1)).enumerate();
    pool.install(|| rows.for_each(|(row, out)| fill(row, out)));
    Ok(())
}

/// Fills `out` with rows of f32 values, like [`fill_rows`].
pub(super) fn fill_floats(
    shape: Shape,
    out: Floats,
    pool: &ThreadPool,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<()> {
    match out {
        Floats::F32(out) => fill_rows(shape, out, pool, fill),
        Floats::Bf16(out) => fill_rows(shape, out, pool, |row, out| {
            let mut values = vec![0.0; out.len()];
            fill(row, &mut values);
            for (bits, value) in out.iter_mut().zip(values) {
                *bits = bf16::from_f32(value).to_bits();
            }
        }),
    }
}

/// Writes the values of some rows, counted over all experts, n x C of them: `fill` gets the row's number.
pub(super) fn look_up_rows(
    shape: Shape,
    rows: &[usize],
    out: Floats,
    pool: &ThreadPool,
    fill: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
    let decode = |named: &mut [Named<f32>]| named.iter_mut().try_for_each(|(row, values)| fill(*row, values));
    match out {
        Floats::F32(out) => rows::look_up(shape, rows, out, pool, |row| row, decode),
        Floats::Bf16(out) => {
            let mut values = vec![0.0; out.len()];
            rows::look_up(shape, rows, &mut values, pool, |row| row, decode)?;
            for (bits, value) in out.iter_mut().zip(values) {
                *bits = bf16::from_f32(value).to_bits();
            }
            Ok(())
        }
    }
}
