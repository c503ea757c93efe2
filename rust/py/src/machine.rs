//! Threads and instruction sets.

use std::collections::BTreeMap;

use moepack_core::formats::ternary::Code;
use moepack_core::{gemm, pool, simd};
use pyo3::prelude::*;

use crate::error::raise;

/// Set the number of threads for all later calls, 1 to 1024. Threads of other libraries are not affected.
///
/// Raises ValueError for any other number.
#[pyfunction]
pub fn set_threads(threads: usize) -> PyResult<()> {
    pool::set_threads(threads).map_err(raise)
}

/// Return the number of threads that calls use.
#[pyfunction]
pub fn threads() -> PyResult<usize> {
    Ok(pool::current().map_err(raise)?.current_num_threads())
}

/// Return the instruction set in use: the one forced by MOEPACK_ISA, otherwise the best one that the processor
/// supports.
///
/// Raises ValueError if the forced set is unknown or not supported.
#[pyfunction]
pub fn isa() -> PyResult<&'static str> {
    simd::active().map(simd::Isa::name).map_err(raise)
}

/// Return the instruction sets that the processor supports, the most general first.
#[pyfunction]
pub fn available_isas() -> Vec<&'static str> {
    simd::Isa::all_available().map(simd::Isa::name).collect()
}

/// Return the matrix product kernel of every packed format on this machine, by the format's name.
///
/// Raises ValueError as `isa`.
#[pyfunction]
pub fn kernels() -> PyResult<BTreeMap<&'static str, &'static str>> {
    let isa = simd::active().map_err(raise)?;
    Ok(Code::ALL
        .into_iter()
        .map(|code| (code.name(), gemm::ternary::kernel_for(code, isa).name()))
        .chain([
            ("groupwise", gemm::groupwise::kernel_name(isa)),
            ("codebook", gemm::codebook::kernel_name(isa)),
            ("coded", gemm::coded::kernel_name(isa)),
        ])
        .collect())
}
