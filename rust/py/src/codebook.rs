//! Packed codebook tensors. A blob keeps a reference to a NumPy array and reads it in place.

use moepack_core::formats::codebook::{self, Content, Layout, View};
use moepack_core::gemm::codebook::Codebook;
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, pool};
use numpy::{Element, IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods};
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyReadonlyArray4, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, filled, products, reading};
use crate::error::raise;
use crate::layer::Packed;

/// Packs codes and codebooks.
///
/// A weight is `scale * centroid[code]`.
///
/// Args:
///     codes: uint8 [experts, rows, columns], C-contiguous, below 2^bits.
///     centroids: int16 [experts, rows, blocks, 2^bits], C-contiguous, -32639 to 32639; multiples of 256 unless
///         activation_bits is 0, for then the high byte alone is stored.
///     scales: float32 [experts, rows, blocks], C-contiguous, finite and not negative.
///     bits: of a code: 2, 3 or 4.
///     block: columns that share a codebook, a multiple of 128; at least the columns means one codebook a row.
///     ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
///     activation_bits: to how many bits the runtime rounds activations: 4 or 8, or 0 for not at all.
///     hadamard: columns that products turn together by Hadamard's matrix before they multiply, a power of two that
///         divides the columns, 1 for not at all; codes and centroids are those of the turned weights.
///
/// Returns:
///     The packed tensor, uint8 [bytes].
///
/// Raises:
///     ValueError: a code, centroid, scale or shape is out of range.
#[pyfunction]
#[pyo3(signature = (codes, centroids, scales, *, bits, block, ndim, activation_bits=0, hadamard=1))]
#[allow(clippy::too_many_arguments)]
pub fn encode_codebook<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray3<'py, u8>,
    centroids: PyReadonlyArray4<'py, i16>,
    scales: PyReadonlyArray3<'py, f32>,
    bits: u8,
    block: usize,
    ndim: u8,
    activation_bits: u8,
    hadamard: usize,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let &[experts, rows, columns] = codes.shape() else {
        unreachable!("the type has three axes")
    };
    if centroids.shape()[..2] != [experts, rows] || scales.shape() != &centroids.shape()[..3] {
        return Err(PyValueError::new_err(format!(
            "centroids {:?} and scales {:?} do not belong to codes {:?}",
            centroids.shape(),
            scales.shape(),
            codes.shape()
        )));
    }
    let content = Content {
        shape: Shape {
            experts,
            rows,
            columns,
            ndim,
        },
        bits,
        activation_bits,
        block,
        hadamard,
        codes: contiguous(codes.as_slice(), "codes")?,
        centroids: contiguous(centroids.as_slice(), "centroids")?,
        scales: contiguous(scales.as_slice(), "scales")?,
    };
    let blob = py.detach(|| codebook::encode(content, &*pool::current()?));
    Ok(blob.map_err(raise)?.into_pyarray(py))
}

/// A packed codebook tensor of experts x rows x columns, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one packed tensor; it is kept and not copied, and may be a read-only
///         memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: header and size contradict each other.
#[pyclass(frozen, module = "moepack._core")]
pub struct CodebookBlob {
    data: Py<PyArray1<u8>>,
    layout: Layout,
}

impl CodebookBlob {
    /// Runs `work` on the view without the interpreter lock. Parsing again is cheap: 128 bytes.
    fn with_view<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&View) -> Result<T> + Send,
    ) -> PyResult<T> {
        reading(py, &self.data, |data| work(&View::parse(data)?))
    }

    /// Fills a new array [experts, rows, columns] row by row without the interpreter lock.
    fn fill<'py, T: Element + Send + Sync>(
        &self,
        py: Python<'py>,
        work: impl Fn(&View, usize, usize, &mut [T]) + Send + Sync,
    ) -> PyResult<Bound<'py, PyArray3<T>>> {
        let shape = self.layout.shape();
        filled(py, [shape.experts, shape.rows, shape.columns], |values| {
            self.with_view(py, |view| {
                for (row, values) in values.chunks_exact_mut(shape.columns.max(1)).enumerate() {
                    work(view, row / shape.rows, row % shape.rows, values);
                }
                Ok(())
            })
        })
    }
}

#[pymethods]
impl CodebookBlob {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<CodebookBlob> {
        let borrowed = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let layout = View::parse(bytes).map_err(raise)?.layout();
        Ok(CodebookBlob {
            data: data.clone().unbind(),
            layout,
        })
    }

    /// The bits of a code: 2, 3 or 4.
    #[getter]
    fn bits(&self) -> u8 {
        self.layout.bits()
    }

    /// To how many bits products round activations unless told otherwise: 4 or 8, or 0 for not at all.
    #[getter]
    fn activation_bits(&self) -> u8 {
        self.layout.activation_bits()
    }

    /// The columns that products turn together by Hadamard's matrix before they multiply; 1 for not at all.
    #[getter]
    fn hadamard(&self) -> usize {
        self.layout.hadamard()
    }

    /// The columns that share a codebook.
    #[getter]
    fn block_size(&self) -> usize {
        self.layout.block_size()
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

    /// Axes of the tensor as its user sees it: 2 or 3.
    #[getter]
    fn ndim(&self) -> u8 {
        self.layout.shape().ndim
    }

    /// The size of the packed tensor in bytes, everything counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.total_bytes()
    }

    /// The codes: uint8 [experts, rows, columns].
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<u8>>> {
        self.fill(py, |view, expert, row, codes| view.decode_row(expert, row, codes))
    }

    /// The values, turned back where products turn activations: float32 [experts, rows, columns].
    fn dequantize<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        self.fill(py, |view, expert, row, values| {
            view.decode_values(expert, row, values)
        })
    }

    /// Checks every parameter and padding byte.
    ///
    /// Raises CorruptionError that names expert, row and block.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify())
    }

    /// y = W x for one expert: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
    ///     expert: whose weights.
    ///     mode: "exact", "int16" or "int8"; by default what the tensor asks for, exact without activation bits.
    ///     activation_bits: of the integer modes, 4 or 8; by default the tensor's, or 8.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes do not match, there is no such expert or mode, or the processor lacks the set.
    #[pyo3(signature = (x, expert=0, *, mode=None, activation_bits=None, isa=None))]
    fn matmul<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        expert: usize,
        mode: Option<&str>,
        activation_bits: Option<u8>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let experts = self.layout.shape().experts;
        if expert >= experts {
            return Err(PyValueError::new_err(format!("no expert {expert} of {experts}")));
        }
        let tokens = x.shape()[0];
        let offsets = (0..=experts)
            .map(|e| if e > expert { tokens } else { 0 })
            .collect();
        self.product(py, x, offsets, (mode, activation_bits), isa)
    }

    /// y = W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: as in `matmul`, its tokens sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
    ///     mode, activation_bits, isa: as in `matmul`.
    ///
    /// Raises ValueError if sizes or offsets do not match, there is no such mode, or the processor lacks the set.
    #[pyo3(signature = (x, offsets, *, mode=None, activation_bits=None, isa=None))]
    fn matmul_grouped<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        offsets: PyReadonlyArray1<'py, i64>,
        mode: Option<&str>,
        activation_bits: Option<u8>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let offsets = expert_offsets(&offsets)?;
        self.product(py, x, offsets, (mode, activation_bits), isa)
    }

    fn __repr__(&self) -> String {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.layout.shape();
        let (bits, bytes) = (self.bits(), self.nbytes());
        format!("CodebookBlob({experts} x {rows} x {columns}, {bits} bits, {bytes} bytes)")
    }
}

impl CodebookBlob {
    fn product<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        offsets: Vec<usize>,
        (mode, activation_bits): (Option<&str>, Option<u8>),
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (mode, isa) = (
            Mode::from_name(mode.unwrap_or("auto")).map_err(raise)?,
            chosen_isa(isa)?,
        );
        let Shape { rows, columns, .. } = self.layout.shape();
        products(py, &x, rows, columns, |x, y| {
            self.with_view(py, |view| {
                let weights = Codebook::with_activation_bits(*view, mode, activation_bits, isa)?;
                matmul_grouped(&weights, x, &offsets, y, &*pool::current()?)
            })
        })
    }
}

impl Packed for CodebookBlob {
    fn array(&self) -> &Py<PyArray1<u8>> {
        &self.data
    }

    fn projection<'a>(
        &'a self,
        data: &'a [u8],
        mode: Option<&str>,
        isa: Isa,
    ) -> Result<Box<dyn Projection + 'a>> {
        let mode = Mode::from_name(mode.unwrap_or("auto"))?;
        Ok(Box::new(Codebook::new(View::parse(data)?, mode, isa)?))
    }
}
