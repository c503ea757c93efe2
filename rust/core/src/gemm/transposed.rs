//! Products by the transposed weights of any format, x' = W^T y, which carry gradients from a layer's outputs to its
//! activations.
//!
//! W is never unpacked as a whole: a panel of [`PANEL`] rows is decoded at a time ([`Tensor::look_up`]) and
//! multiplied by the outputs of its expert's tokens. Weights are those of [`Tensor::dequantize`] in f32,
//! regardless of the rounding of a product's compute mode: gradients pass straight through the rounding.
//!
//! A sum runs over the rows in ascending order without fused operations, so results have the same bits on every
//! instruction set and with any number of threads. With u = 2^-24, R rows and S = sum of |w y|, the error is at most
//! R u S.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::matmul::check_offsets;
use crate::simd::{Isa, vectorized};
use crate::tensor::{Floats, Tensor};
use crate::types::Activations;
use crate::{Error, Result};

/// Rows decoded at a time: whole streams of every coded format.
const PANEL: usize = 64;
/// Columns summed in registers.
const LANES: usize = 16;
/// Tokens summed in registers at a time.
const TOKENS: usize = 4;
/// Tokens of a unit of work, which share a copy of [`PANEL`] x [`LANES`] weights in the first-level cache.
const UNIT: usize = 32;

/// Computes x' = W^T y with each expert's own tokens: `y` is tokens x rows, `x` tokens x columns, and `offsets` are
/// as in [`super::matmul_grouped`]. Experts without tokens are not read.
///
/// # Errors
/// [`Error::InvalidArgument`] if the offsets or sizes do not match, the processor lacks the instruction set, or the
/// format cannot decode single rows. [`Error::Corruption`] if codes contradict the format.
pub fn matmul_transposed<'a>(
    weights: (&dyn Tensor, &[u8]),
    y: impl Into<Activations<'a>>,
    offsets: &[usize],
    x: &mut [f32],
    isa: Isa,
    pool: &ThreadPool,
) -> Result<()> {
    let (tensor, data) = weights;
    let (shape, isa, y) = (tensor.shape(), isa.vectors(), y.into());
    check_offsets(offsets, shape.experts)?;
    let tokens = offsets[shape.experts];
    if tokens.checked_mul(shape.rows) != Some(y.len()) || tokens.checked_mul(shape.columns) != Some(x.len()) {
        let (outputs, inputs) = (y.len(), x.len());
        let message = format!("{outputs} outputs and {inputs} activations for {tokens} tokens of {shape:?}");
        return Err(Error::InvalidArgument(message));
    }
    x.fill(0.0);
    let mut panel = vec![0.0; PANEL.min(shape.rows) * shape.columns];
    for (expert, run) in offsets.windows(2).enumerate().filter(|(_, run)| run[0] < run[1]) {
        let x = &mut x[run[0] * shape.columns..run[1] * shape.columns];
        for first in (0..shape.rows).step_by(PANEL) {
            let count = PANEL.min(shape.rows - first);
            let rows: Vec<usize> = (first..first + count)
                .map(|row| expert * shape.rows + row)
                .collect();
            let panel = &mut panel[..count * shape.columns];
            tensor.look_up(data, &rows, Floats::F32(panel), pool)?;
            let outputs = Outputs {
                values: y,
                start: run[0] * shape.rows + first,
                stride: shape.rows,
                count,
            };
            add_panel(isa, panel, &outputs, x, pool);
        }
    }
    Ok(())
}

/// The outputs of an expert's tokens at the rows of a panel.
struct Outputs<'a> {
    values: Activations<'a>,
    /// The start of the first token's outputs, and the stride between tokens.
    start: usize,
    stride: usize,
    /// The number of rows in the panel.
    count: usize,
}

/// Adds the products of a panel with its outputs to `x`, units of tokens in parallel.
fn add_panel(isa: Isa, panel: &[f32], outputs: &Outputs, x: &mut [f32], pool: &ThreadPool) {
    let columns = panel.len() / outputs.count;
    if columns == 0 {
        return;
    }
    let units = x.par_chunks_mut(UNIT * columns).enumerate();
    let add = |(unit, x): (usize, &mut [f32])| {
        let tokens = x.len() / columns;
        let mut y = vec![0.0; tokens * outputs.count];
        for (token, y) in y.chunks_exact_mut(outputs.count).enumerate() {
            let start = outputs.start + (unit * UNIT + token) * outputs.stride;
            outputs.values.widen(start, y);
        }
        add_unit(isa, panel, columns, &y, x);
    };
    pool.install(|| units.for_each(add));
}

vectorized! {
    /// Adds the products of a panel, rows x `columns`, with `y`, tokens x rows, to `x`, tokens x `columns`.
    fn add_unit(panel: &[f32], columns: usize, y: &[f32], x: &mut [f32]) = add_unit_loop;
}

#[inline(always)]
fn add_unit_loop(panel: &[f32], columns: usize, y: &[f32], x: &mut [f32]) {
    let rows = panel.len() / columns;
    // Rows with a power-of-two stride share few cache lines; their copies are contiguous.
    let mut copy = [[0.0; LANES]; PANEL];
    for column in (0..columns).step_by(LANES) {
        let width = LANES.min(columns - column);
        for (copy, row) in copy.iter_mut().zip(panel.chunks_exact(columns)) {
            copy[..width].copy_from_slice(&row[column..column + width]);
        }
        let weights = &copy[..rows];
        let quads = y.chunks(TOKENS * rows).zip(x.chunks_mut(TOKENS * columns));
        for (y, x) in quads {
            match y.len() / rows {
                TOKENS => add_tokens::<TOKENS>(weights, y, x, columns, column..column + width),
                _ => y.chunks(rows).zip(x.chunks_mut(columns)).for_each(|(y, x)| {
                    add_tokens::<1>(weights, y, x, columns, column..column + width);
                }),
            }
        }
    }
}

/// Adds the products of some columns for `N` tokens with sums in registers.
#[inline(always)]
fn add_tokens<const N: usize>(
    weights: &[[f32; LANES]],
    y: &[f32],
    x: &mut [f32],
    columns: usize,
    place: std::ops::Range<usize>,
) {
    let mut sums = [[0.0; LANES]; N];
    for (sums, x) in sums.iter_mut().zip(x.chunks_exact(columns)) {
        sums[..place.len()].copy_from_slice(&x[place.clone()]);
    }
    let outputs: [&[f32]; N] = std::array::from_fn(|token| &y[token * weights.len()..][..weights.len()]);
    for (row, weights) in weights.iter().enumerate() {
        for token in 0..N {
            let output = outputs[token][row];
            for lane in 0..LANES {
                sums[token][lane] += output * weights[lane];
            }
        }
    }
    for (sums, x) in sums.iter().zip(x.chunks_exact_mut(columns)) {
        x[place.clone()].copy_from_slice(&sums[..place.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::groupwise::{ParameterType, Spec, encode};
    use crate::types::Shape;
    use crate::{pool, tensor};

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0;
        (0..count).map(number).collect()
    }

    fn packed(shape: Shape) -> Vec<u8> {
        let spec = Spec {
            bits: 4,
            group: 16,
            symmetric: true,
            parameters: ParameterType::F16,
        };
        let (weights, groups) = (shape.weights().unwrap(), shape.columns.div_ceil(16));
        let codes: Vec<u8> = (0..weights).map(|i| (i * 31 % 16) as u8).collect();
        let scales: Vec<f32> = (0..shape.all_rows().unwrap() * groups)
            .map(|i| (i % 7 + 1) as f32 / 64.0)
            .collect();
        encode(&codes, &scales, None, shape, spec, &pool::current().unwrap()).unwrap()
    }

    #[test]
    fn products_are_within_their_bound_and_the_same_on_all_sets() {
        let pool = pool::current().unwrap();
        for (rows, columns, counts) in [(1, 1, [1, 0, 2]), (70, 40, [5, 0, 37]), (130, 16, [0, 4, 1])] {
            let shape = Shape {
                experts: 3,
                rows,
                columns,
                ndim: 3,
            };
            let data = packed(shape);
            let opened = tensor::open(&data).unwrap();
            let mut weights = vec![0.0; shape.weights().unwrap()];
            opened
                .dequantize(&data, Floats::F32(&mut weights), &pool)
                .unwrap();
            let offsets = [0, counts[0], counts[0] + counts[1], counts.iter().sum()];
            let y = numbers(offsets[3] * rows, 3);
            let run = |isa| {
                let mut x = vec![f32::NAN; offsets[3] * columns];
                matmul_transposed((&*opened, &data), &y[..], &offsets, &mut x, isa, &pool).unwrap();
                x
            };
            let scalar = run(Isa::SCALAR);
            for (at, &found) in scalar.iter().enumerate() {
                let (token, column) = (at / columns, at % columns);
                let expert = offsets.partition_point(|&offset| offset <= token) - 1;
                let term = |row: usize| {
                    let weight = weights[(expert * rows + row) * columns + column];
                    f64::from(weight) * f64::from(y[token * rows + row])
                };
                let size: f64 = (0..rows).map(|row| term(row).abs()).sum();
                let bound = rows as f64 * 2f64.powi(-24) * size;
                assert!((f64::from(found) - (0..rows).map(term).sum::<f64>()).abs() <= bound);
            }
            for isa in Isa::all_available() {
                assert_eq!(run(isa), scalar);
            }
        }
    }

    #[test]
    fn sizes_that_do_not_match_are_refused() {
        let shape = Shape {
            experts: 2,
            rows: 3,
            columns: 16,
            ndim: 3,
        };
        let (data, pool) = (packed(shape), pool::current().unwrap());
        let opened = tensor::open(&data).unwrap();
        let mut x = [0.0; 32];
        let mut run = |offsets: &[usize], outputs: usize| {
            matmul_transposed(
                (&*opened, &data),
                &[0.0; 9][..outputs],
                offsets,
                &mut x,
                Isa::SCALAR,
                &pool,
            )
        };
        assert!(run(&[0, 1, 2], 6).is_ok());
        assert!(run(&[0, 1, 2], 9).is_err() && run(&[0, 2, 1], 6).is_err() && run(&[0, 2], 6).is_err());
    }
}
