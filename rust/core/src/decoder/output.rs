//! The output projection of a mixer, and its addition to the hidden state.

use super::{Linear, add};
use crate::gemm::layer::Job;
use crate::gemm::layer::matrices::Matrices;
use crate::gemm::layer::prefetch::Prefetch;
use crate::gemm::layer::region::Thread;
use crate::types::Activations;

/// The output projection of a mixer in a step.
pub(super) struct Output<'a> {
    linear: &'a Linear<'a>,
    matrix: Matrices<'a>,
    /// The memory that is read first.
    pub prefetch: Prefetch<'a>,
}

impl<'a> Output<'a> {
    pub fn new(linear: &'a Linear<'a>, threads: usize) -> Output<'a> {
        let matrix = Matrices::new(&[&*linear.weights], Job::of_offsets(&[0, 1]), threads);
        Output {
            linear,
            prefetch: matrix.prefetch(threads),
            matrix,
        }
    }

    /// Multiplies `x` on a thread of a region. The memory of `next` is read afterwards.
    pub fn multiply<'s>(&self, thread: &mut Thread<'_, 's>, x: &[f32], next: &'s Prefetch<'s>) {
        self.matrix.multiply(thread, Activations::F32(x), Some(next));
    }

    /// Adds the products and the bias to `sum`.
    pub fn add(&self, sum: &mut [f32]) {
        add(Activations::F32(self.matrix.values(0)), sum);
        self.linear.add_bias(sum);
    }
}
