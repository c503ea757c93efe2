//! Dense matrices for the core's parallel regions. A matrix keeps a reference to a NumPy array and reads it in place.

use moepack_core::gemm::dense::{Dense, Kind, View};
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::matmul;
use moepack_core::simd::Isa;
use moepack_core::types::Mode;
use moepack_core::{Result, pool};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, products};
use crate::error::{invalid, raise};
use crate::packed::Packed;

/// A dense matrix of rows x columns, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous: the values, row by row; it is referenced and not copied.
///     dtype: "float32" or "bfloat16".
///     rows, columns: the shape.
///
/// Raises:
///     ValueError: the dtype is unknown, or the size does not match.
#[pyclass(frozen, module = "moepack._core")]
pub struct DenseMatrix {
    data: Py<PyArray1<u8>>,
    kind: Kind,
    rows: usize,
    columns: usize,
}

#[pymethods]
impl DenseMatrix {
    #[new]
    fn new(
        data: &Bound<'_, PyArray1<u8>>,
        dtype: &str,
        rows: usize,
        columns: usize,
    ) -> PyResult<DenseMatrix> {
        let kind = match dtype {
            "float32" => Kind::F32,
            "bfloat16" => Kind::Bf16,
            _ => {
                return invalid(format!(
                    "dtype must be \"float32\" or \"bfloat16\", not {dtype:?}"
                ));
            }
        };
        let borrowed = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        View::new(bytes, kind, rows, columns).map_err(raise)?;
        Ok(DenseMatrix {
            data: data.clone().unbind(),
            kind,
            rows,
            columns,
        })
    }

    /// Return y = W x, float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as bits in uint16; [tokens, columns], C-contiguous. Each token reads the matrix.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes do not match or the processor lacks the set.
    #[pyo3(signature = (x, isa=None))]
    fn matmul<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (isa, tokens) = (chosen_isa(isa)?, x.shape()[0]);
        let data = self.data.bind(py).try_readonly()?;
        let bytes = contiguous(data.as_slice(), "data")?;
        products(py, &x, self.rows, self.columns, |x, y| {
            let work = || {
                let view = View::new(bytes, self.kind, self.rows, self.columns)?;
                let matrix = Dense::new(view, Mode::Auto, isa)?;
                matmul(&matrix, 0, x, tokens, y, &*pool::current()?)
            };
            py.detach(work).map_err(raise)
        })
    }

    fn __repr__(&self) -> String {
        format!("DenseMatrix({} x {}, {:?})", self.rows, self.columns, self.kind)
    }
}

impl Packed for DenseMatrix {
    fn array(&self) -> &Py<PyArray1<u8>> {
        &self.data
    }

    fn projection<'a>(
        &'a self,
        data: &'a [u8],
        _mode: Option<&str>,
        isa: Isa,
    ) -> Result<Box<dyn Projection + 'a>> {
        let view = View::new(data, self.kind, self.rows, self.columns)?;
        Ok(Box::new(Dense::new(view, Mode::Auto, isa)?))
    }
}
