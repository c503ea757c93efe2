//! Entropy-coded group-wise tensors: written from packed ones, read and multiplied in place.

use moepack_core::formats::coded_groupwise::{self, Coded, CodedView};
use moepack_core::formats::groupwise::View;
use moepack_core::gemm::groupwise::Groupwise;
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, pool};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, products, reading};
use crate::error::raise;
use crate::groupwise::GroupwiseBlob;
use crate::layer::Packed;

/// Codes a packed group-wise tensor block by block.
///
/// Args:
///     data: uint8 [bytes], contiguous, as `encode_groupwise` writes it.
///
/// Returns:
///     The coded tensor, uint8 [bytes]; smaller or not.
///
/// Raises:
///     CorruptionError: the bytes are no group-wise tensor.
///     ValueError: its rows are too long for the coded format (beyond some 45,000 columns of 2 bits).
#[pyfunction]
pub fn code_groupwise<'py>(
    py: Python<'py>,
    data: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let data = contiguous(data.as_slice(), "data")?;
    let coded = py.detach(|| coded_groupwise::encode(&View::parse(data)?, &*pool::current()?));
    Ok(coded.map_err(raise)?.into_pyarray(py))
}

/// An entropy-coded group-wise tensor of experts x rows x columns, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one coded tensor; it is kept and not copied, and may be a read-only
///         memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: header, index and size contradict each other.
#[pyclass(frozen, module = "moepack._core")]
pub struct CodedGroupwiseBlob {
    data: Py<PyArray1<u8>>,
    coded: Coded,
}

impl CodedGroupwiseBlob {
    /// Runs `work` on the view without the interpreter lock.
    fn with_view<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&CodedView) -> Result<T> + Send,
    ) -> PyResult<T> {
        reading(py, &self.data, |data| work(&self.coded.view(data)?))
    }

    fn shape(&self) -> Shape {
        self.coded.layout().shape()
    }

    fn plain(&self, py: Python<'_>) -> PyResult<GroupwiseBlob> {
        GroupwiseBlob::new(&self.expand(py)?)
    }
}

#[pymethods]
impl CodedGroupwiseBlob {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<CodedGroupwiseBlob> {
        let borrowed: PyReadonlyArray1<u8> = data.try_readonly()?;
        let coded = Coded::parse(contiguous(borrowed.as_slice(), "data")?).map_err(raise)?;
        Ok(CodedGroupwiseBlob {
            data: data.clone().unbind(),
            coded,
        })
    }

    /// The bits of a code: 2, 3, 4 or 8.
    #[getter]
    fn bits(&self) -> u8 {
        self.coded.layout().spec().bits
    }

    /// The columns that share a scale; of one group a row, the columns.
    #[getter]
    fn group_size(&self) -> usize {
        self.coded.layout().group_size()
    }

    /// Whether weights are scale * (code - 2^(bits - 1)), without offsets.
    #[getter]
    fn symmetric(&self) -> bool {
        self.coded.layout().spec().symmetric
    }

    /// The type of the stored parameters: "float16" or "bfloat16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.coded.layout().spec().parameters.name()
    }

    /// The number of experts, 1 for a matrix.
    #[getter]
    fn experts(&self) -> usize {
        self.shape().experts
    }

    /// The number of rows of an expert.
    #[getter]
    fn rows(&self) -> usize {
        self.shape().rows
    }

    /// The number of columns.
    #[getter]
    fn columns(&self) -> usize {
        self.shape().columns
    }

    /// Axes of the tensor as its user sees it: 2 or 3.
    #[getter]
    fn ndim(&self) -> u8 {
        self.shape().ndim
    }

    /// The size of the coded tensor in bytes, everything counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.coded.total_bytes()
    }

    /// The tensor without the entropy code, as `GroupwiseBlob` reads it: uint8 [bytes].
    fn expand<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let plain = self.with_view(py, |view| view.expand(&*pool::current()?))?;
        Ok(plain.into_pyarray(py))
    }

    /// The codes: uint8 [experts, rows, columns].
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<u8>>> {
        self.plain(py)?.decode(py)
    }

    /// The values: float32 [experts, rows, columns].
    fn dequantize<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        self.plain(py)?.dequantize(py)
    }

    /// Decodes everything and checks every parameter and padding byte.
    ///
    /// Raises CorruptionError that names the block, or expert and row.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify(&*pool::current()?))
    }

    /// y = W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
    ///     mode: "exact" (the precision of float32), "int8" (quantized for each token and group of columns) or "bf16"
    ///         (rounded; few tokens exactly).
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes or offsets do not match, or the processor lacks the set.
    #[pyo3(signature = (x, offsets, mode="exact", isa=None))]
    fn matmul_grouped<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        offsets: PyReadonlyArray1<'py, i64>,
        mode: &str,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (mode, isa) = (Mode::from_name(mode).map_err(raise)?, chosen_isa(isa)?);
        let offsets = expert_offsets(&offsets)?;
        let Shape { rows, columns, .. } = self.shape();
        products(py, &x, rows, columns, |x, y| {
            self.with_view(py, |view| {
                let weights = Groupwise::new(view, mode, isa)?;
                matmul_grouped(&weights, x, &offsets, y, &*pool::current()?)
            })
        })
    }

    fn __repr__(&self) -> String {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape();
        let (bits, bytes) = (self.bits(), self.nbytes());
        format!("CodedGroupwiseBlob({experts} x {rows} x {columns}, {bits} bits, {bytes} bytes)")
    }
}

impl Packed for CodedGroupwiseBlob {
    fn array(&self) -> &Py<PyArray1<u8>> {
        &self.data
    }

    fn projection<'a>(
        &'a self,
        data: &'a [u8],
        mode: Option<&str>,
        isa: Isa,
    ) -> Result<Box<dyn Projection + 'a>> {
        let mode = Mode::from_name(mode.unwrap_or(Mode::Exact.name()))?;
        Ok(Box::new(Groupwise::new(self.coded.view(data)?, mode, isa)?))
    }
}
