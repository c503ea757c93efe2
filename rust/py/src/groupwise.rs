//! Packed group-wise tensors. A blob keeps a reference to a NumPy array and reads it in place.

use moepack_core::groupwise::{self, Layout, View};
use moepack_core::ternary::Shape;
use moepack_core::{Result, gemm, pool};
use numpy::{Element, IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods};
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, filled, products};
use crate::error::raise;

/// Packs 2-bit group-wise codes.
///
/// Args:
///     codes: uint8 [experts, rows, columns], C-contiguous, 0 to 3.
///     parameters: float32 [experts, rows, 2 * groups], C-contiguous: scale (>= 0) and offset of each group, f16 values.
///     group_size: columns a group, a multiple of 64; at least the columns means one group a row.
///     rank: what the tensor is to its user: 2 (a matrix, one expert) or 3.
///
/// Returns:
///     The packed tensor, uint8 [bytes].
///
/// Raises:
///     ValueError: a code, parameter or shape is out of range.
#[pyfunction]
#[pyo3(signature = (codes, parameters, *, group_size, rank))]
pub fn encode_groupwise<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray3<'py, u8>,
    parameters: PyReadonlyArray3<'py, f32>,
    group_size: usize,
    rank: u8,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let &[experts, rows, columns] = codes.shape() else {
        unreachable!("the type has three axes")
    };
    let codes = contiguous(codes.as_slice(), "codes")?;
    let parameters = contiguous(parameters.as_slice(), "parameters")?;
    let shape = Shape {
        experts,
        rows,
        columns,
        rank,
    };
    let blob = py.detach(|| groupwise::encode(codes, parameters, shape, group_size, &*pool::current()?));
    Ok(blob.map_err(raise)?.into_pyarray(py))
}

/// A packed group-wise tensor of experts x rows x columns, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one packed tensor; it is kept and not copied, and may be a read-only
///         memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: header and size contradict each other.
#[pyclass(frozen, module = "moepack._core")]
pub struct GroupwiseBlob {
    data: Py<PyArray1<u8>>,
    layout: Layout,
}

impl GroupwiseBlob {
    /// Runs `work` on the view without the interpreter lock. Parsing again is cheap: 128 bytes.
    fn with_view<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&View) -> Result<T> + Send,
    ) -> PyResult<T> {
        let data = self.data.bind(py).try_readonly()?;
        let data = contiguous(data.as_slice(), "data")?;
        py.detach(|| work(&View::parse(data)?)).map_err(raise)
    }

    /// Fills a new array [experts, rows, columns] row by row without the interpreter lock.
    fn fill<'py, T: Element + Send + Sync>(
        &self,
        py: Python<'py>,
        work: impl Fn(&View, usize, &mut [T]) + Send + Sync,
    ) -> PyResult<Bound<'py, PyArray3<T>>> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.layout.shape();
        filled(py, [experts, rows, columns], |values| {
            self.with_view(py, |view| {
                let rows = values.chunks_exact_mut(columns.max(1)).enumerate();
                rows.for_each(|(row, values)| work(view, row, values));
                Ok(())
            })
        })
    }
}

#[pymethods]
impl GroupwiseBlob {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<GroupwiseBlob> {
        let borrowed: PyReadonlyArray1<u8> = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let layout = View::parse(bytes).map_err(raise)?.layout();
        Ok(GroupwiseBlob {
            data: data.clone().unbind(),
            layout,
        })
    }

    /// The bits of a code: 2.
    #[getter]
    fn bits(&self) -> u8 {
        self.layout.bits()
    }

    /// The columns that share a scale and an offset.
    #[getter]
    fn group_size(&self) -> usize {
        self.layout.group_size()
    }

    /// The number of experts, 1 for a matrix.
    #[getter]
    fn experts(&self) -> usize {
        self.layout.shape().experts
    }

    /// The number of rows of an expert.
    #[getter]
    fn rows(&self) -> usize {
        self.layout.shape().rows
    }

    /// The number of columns.
    #[getter]
    fn columns(&self) -> usize {
        self.layout.shape().columns
    }

    /// The rank of the tensor as its user sees it: 2 or 3.
    #[getter]
    fn rank(&self) -> u8 {
        self.layout.shape().rank
    }

    /// The size of the packed tensor in bytes, everything counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.total_bytes()
    }

    /// The codes: uint8 [experts, rows, columns].
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<u8>>> {
        self.fill(py, |view, row, codes| view.decode_row(row, codes))
    }

    /// The values: float32 [experts, rows, columns].
    fn dequantize<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        self.fill(py, |view, row, values| view.decode_values(row, values))
    }

    /// Checks every parameter and padding byte.
    ///
    /// Raises CorruptionError that names expert and row.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify())
    }

    /// y = W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes or offsets do not match, or the processor lacks the set.
    #[pyo3(signature = (x, offsets, isa=None))]
    fn matmul_grouped<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        offsets: PyReadonlyArray1<'py, i64>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let isa = chosen_isa(isa)?;
        let offsets = expert_offsets(&offsets)?;
        let Shape { rows, columns, .. } = self.layout.shape();
        products(py, &x, rows, columns, |x, y| {
            self.with_view(py, |view| {
                gemm::groupwise::matmul_grouped(view, x, &offsets, y, isa, &*pool::current()?)
            })
        })
    }

    fn __repr__(&self) -> String {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.layout.shape();
        let (bits, bytes) = (self.bits(), self.nbytes());
        format!("GroupwiseBlob({experts} x {rows} x {columns}, {bits} bits, {bytes} bytes)")
    }
}
