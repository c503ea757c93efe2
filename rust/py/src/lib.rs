//! `moepack._core`: converts Python's arguments, releases the interpreter lock, calls the core. No logic lives here.

mod arrays;
mod clustering;
mod codebook;
mod coded;
mod compensated;
mod decoder;
mod dense;
mod error;
mod fitting;
mod groupwise;
mod held;
mod kmeans;
mod layer;
mod machine;
mod ternary;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::clustering::refine_codebooks;
    #[pymodule_export]
    use super::codebook::{CodebookBlob, encode_codebook};
    #[pymodule_export]
    use super::coded::{CodedGroupwiseBlob, code_groupwise};
    #[pymodule_export]
    use super::compensated::{CompensatedBlob, encode_compensated, encode_compensated_f16};
    #[pymodule_export]
    use super::decoder::Decoder;
    #[pymodule_export]
    use super::dense::DenseMatrix;
    #[pymodule_export]
    use super::error::CorruptionError;
    #[pymodule_export]
    use super::fitting::fit_groups;
    #[pymodule_export]
    use super::groupwise::{GroupwiseBlob, encode_groupwise, pack_int3, unpack_int3};
    #[pymodule_export]
    use super::kmeans::kmeans;
    #[pymodule_export]
    use super::layer::gated_experts;
    #[pymodule_export]
    use super::machine::{available_isas, isa, kernels, set_threads, threads};
    #[pymodule_export]
    use super::ternary::{TernaryBlob, encode_ternary};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
