//! The operands of products: packed tensors and dense matrices.

use moepack_core::Result;
use moepack_core::gemm::layer::Projection;
use moepack_core::simd::Isa;
use numpy::PyArray1;
use pyo3::Py;

/// A tensor, packed or dense, that can be an operand of layers.
pub trait Packed: Sync {
    /// Its bytes.
    fn array(&self) -> &Py<PyArray1<u8>>;

    /// The tensor over `data`, with a named mode (by default the format's own) and an instruction set.
    fn projection<'a>(
        &'a self,
        data: &'a [u8],
        mode: Option<&str>,
        isa: Isa,
    ) -> Result<Box<dyn Projection + 'a>>;
}
