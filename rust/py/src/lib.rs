//! `moepack._core`: converts Python's arguments, releases the interpreter lock and calls the core. It contains no
//! logic. python/moepack/_core.pyi documents the arguments, shapes, dtypes and errors of each function.

mod arrays;
mod decoder;
mod dense;
mod description;
mod device;
mod encode;
mod error;
mod held;
mod layer;
mod machine;
mod packed;
mod solvers;
mod streaming;
mod tables;
mod tensor;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::decoder::Decoder;
    #[pymodule_export]
    use super::dense::DenseMatrix;
    #[pymodule_export]
    use super::device::{coded_frame, coded_from_device, coded_to_device};
    #[pymodule_export]
    use super::encode::{
        decode_coded, encode_channels, encode_codebook, encode_coded, encode_groupwise, encode_ternary,
    };
    #[pymodule_export]
    use super::encode::{encode_compensated, pack_int3, unpack_int3};
    #[pymodule_export]
    use super::error::{CorruptionError, UnknownFormatError};
    #[pymodule_export]
    use super::layer::{gated_experts, refine_channels, sparse_channels, sparse_experts};
    #[pymodule_export]
    use super::machine::{available_isas, isa, kernels, set_threads, threads};
    #[pymodule_export]
    use super::solvers::{
        count_integers, count_symbols, count_values, fit_groups, kmeans, refine_codebooks, round_priced,
        round_samples, search_scales, solve_dependent,
    };
    #[pymodule_export]
    use super::streaming::{RecordMemory, StreamedChannels};
    #[pymodule_export]
    use super::tables::ternary_table;
    #[pymodule_export]
    use super::tensor::{PackedTensor, formats, packed_bytes};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
