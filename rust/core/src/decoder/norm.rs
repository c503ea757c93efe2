//! Root mean square norms: x / sqrt(mean of x^2 + eps) * (weight + offset).

use super::require;
use crate::Result;
use crate::gemm::dense::dot;
use crate::simd::{Isa, vectorized};
use crate::types::Activations;

/// A norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// The weight, without the offset.
    pub weight: Activations<'a>,
    /// Added to the mean of squares.
    pub epsilon: f32,
    /// Added to the weight.
    pub offset: f32,
}

impl Norm<'_> {
    /// Normalizes `x` in place, in runs of the weight's length.
    pub(super) fn apply(&self, isa: Isa, x: &mut [f32]) {
        let mut weight = vec![0.0; self.weight.len()];
        self.weight.widen(0, &mut weight);
        weight.iter_mut().for_each(|weight| *weight += self.offset);
        for x in x.chunks_exact_mut(weight.len().max(1)) {
            normalize(isa, x, &weight, self.epsilon);
        }
    }

    pub(super) fn check(&self, len: usize, name: &str) -> Result<()> {
        require(self.weight.len() == len, || {
            format!("{name} has {} weights instead of {len}", self.weight.len())
        })
    }
}

vectorized! {
    fn normalize(x: &mut [f32], weight: &[f32], epsilon: f32) = normalize_loop;
}

#[inline(always)]
fn normalize_loop(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let mean = dot(Activations::F32(x), 0, x) / x.len() as f32;
    let factor = 1.0 / (mean + epsilon).sqrt();
    x.iter_mut()
        .zip(weight)
        .for_each(|(x, weight)| *x = *x * factor * weight);
}
