//! Properties that hold for arbitrary bytes, one module per target, for libFuzzer (`../libfuzzer`) and for blind
//! mutations (`../tests`).
//!
//! A target returns for any bytes, and panics if a property is violated.

pub mod coded_integers;
pub mod device_read;
pub mod kernel_twins;
pub mod tensor_changed;
pub mod tensor_open;
pub mod tensor_read;
pub mod ternary_round_trip;

use std::cell::OnceCell;

use moepack_core::Result;
use moepack_core::gemm::matmul_grouped;
use moepack_core::tensor::{Compute, Tensor};
use moepack_core::types::Shape;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A pool with only the calling thread: passing work to another thread would take longer than most runs.
pub fn pool() -> &'static ThreadPool {
    thread_local!(static POOL: OnceCell<&'static ThreadPool> = const { OnceCell::new() });
    let build = || {
        ThreadPoolBuilder::new()
            .num_threads(1)
            .use_current_thread()
            .build()
    };
    POOL.with(|pool| {
        *pool.get_or_init(|| Box::leak(Box::new(build().expect("the thread is in no pool yet"))))
    })
}

/// Returns whether a tensor has at most `limit` rows, columns, experts and weights. Larger ones only cost time: a row
/// of zeros takes no bytes, so a few bytes can stand for billions of weights.
pub fn is_small(shape: Shape, limit: usize) -> bool {
    let sizes = [
        shape.all_rows(),
        shape.weights(),
        Some(shape.columns),
        Some(shape.experts),
    ];
    sizes.iter().all(|size| size.is_some_and(|size| size <= limit))
}

/// The products of a tensor's last expert with tokens of `x`: tokens x rows. There must be an expert.
///
/// # Errors
/// The errors of the projection.
pub fn product(
    tensor: &dyn Tensor,
    data: &[u8],
    x: &[f32],
    tokens: usize,
    compute: Compute,
) -> Result<Vec<f32>> {
    let shape = tensor.shape();
    let (mut y, mut offsets) = (vec![0.0; tokens * shape.rows], vec![0; shape.experts]);
    offsets.push(tokens);
    matmul_grouped(&*tensor.projection(data, compute)?, x, &offsets, &mut y, pool())?;
    Ok(y)
}
