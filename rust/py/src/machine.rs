//! Threads and instruction sets.

use std::collections::BTreeMap;

use moepack_core::formats::ternary::Code;
use moepack_core::{gemm, pool, simd};
use pyo3::prelude::*;

use crate::error::raise;

/// Sets the number of threads of all later calls, 1 to 1024. Other libraries' threads are not touched.
///
/// Raises ValueError for any other number.
#[pyfunction]
pub fn set_threads(threads: usize) -> PyResult<()> {
    pool::set_threads(threads).map_err(raise)
}

/// The number of threads that calls use.
#[pyfunction]
pub fn threads() -> PyResult<usize> {
    Ok(pool::current().map_err(raise)?.current_num_threads())
}

/// The instruction set in use: the one that MOEPACK_ISA forces, otherwise the best that the processor runs.
///
/// Raises ValueError if the forced set is unknown or the processor does not run it.
#[pyfunction]
pub fn isa() -> PyResult<&'static str> {
    simd::active().map(simd::Isa::name).map_err(raise)
}

/// The instruction sets that the processor runs, the most general first.
#[pyfunction]
pub fn available_isas() -> Vec<&'static str> {
    simd::Isa::ALL
        .into_iter()
        .filter(|isa| isa.available())
        .map(simd::Isa::name)
        .collect()
}

/// The kernel that matrix products of every packed format run on this machine, by the format's name.
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
            ("coded", isa.name()),
        ])
        .collect())
}
