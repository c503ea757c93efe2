//! The two inner loops as portable loops over lanes.

use super::TOKENS;
use crate::formats::compensated::FactorRow;
use crate::formats::compensated::chunk::{CHUNK, LANES};

/// The coefficients z of an expert, ranks x stride; a run of tokens uses those from `first` on.
#[derive(Clone, Copy)]
pub struct Coefficients<'a> {
    pub z: &'a [f32],
    pub ranks: usize,
    pub stride: usize,
    pub first: usize,
}

/// Computes z[t] = row . x[t]; x holds whole chunks of each token.
pub fn project_rows(row: &FactorRow, x: &[f32], z: &mut [f32]) {
    let width = x.len() / z.len();
    for (x, z) in x.chunks(TOKENS * width).zip(z.chunks_mut(TOKENS)) {
        let mut sums = [[0.0f32; LANES]; TOKENS];
        for chunk in 0..width / CHUNK {
            let (scale, values) = row.chunk(chunk);
            for (sums, x) in sums.iter_mut().zip(x.chunks_exact(width)) {
                let x = &x[chunk * CHUNK..][..CHUNK];
                let mut part = [0.0f32; LANES];
                for plane in 0..CHUNK / LANES {
                    for lane in 0..LANES {
                        part[lane] += values[plane * LANES + lane] * x[plane * LANES + lane];
                    }
                }
                for lane in 0..LANES {
                    sums[lane] += scale * part[lane];
                }
            }
        }
        for (z, sums) in z.iter_mut().zip(sums) {
            *z = (sums[0] + sums[4]) + (sums[1] + sums[5]) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
        }
    }
}

/// Computes y[t] += sum over ranks of z[k][t] * row k, starting at chunk `first_chunk`; y is tokens x columns of
/// equal length.
pub fn expand_rows<'a>(
    left: &impl Fn(usize) -> FactorRow<'a>,
    coefficients: Coefficients,
    tokens: usize,
    first_chunk: usize,
    y: &mut [f32],
) {
    let columns = y.len() / tokens;
    for chunk in 0..columns.div_ceil(CHUNK) {
        let mut sums = [[0.0f32; CHUNK]; TOKENS];
        for index in 0..coefficients.ranks {
            let (scale, values) = left(index).chunk(first_chunk + chunk);
            let z = &coefficients.z[index * coefficients.stride + coefficients.first..][..tokens];
            for (sums, &z) in sums.iter_mut().zip(z) {
                let factor = scale * z;
                for i in 0..CHUNK {
                    sums[i] += factor * values[i];
                }
            }
        }
        for (sums, y) in sums.iter().zip(y.chunks_exact_mut(columns)) {
            for (y, sum) in y[chunk * CHUNK..].iter_mut().zip(sums) {
                *y += sum;
            }
        }
    }
}
