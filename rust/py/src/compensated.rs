//! Packed group-wise tensors with low-rank compensators. A blob keeps a reference to a NumPy array and reads it in place.

use moepack_core::formats::compensated::chunk::Width;
use moepack_core::formats::compensated::{self, Factor, Layout, View};
use moepack_core::gemm::compensated::Compensated;
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::{matmul, matmul_grouped};
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, pool};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods};
use numpy::{PyReadonlyArray1, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rayon::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, filled, products, reading};
use crate::error::raise;
use crate::layer::Packed;

/// Codes [ranks, n] and scales [ranks, ceil(n / 64)] of one factor.
type Codes<'py> = (PyReadonlyArray2<'py, u8>, PyReadonlyArray2<'py, f32>);

fn ranks_of(ranks: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<usize>> {
    let ranks = ranks.as_array();
    let ranks: std::result::Result<Vec<_>, _> = ranks.iter().map(|&rank| usize::try_from(rank)).collect();
    ranks.map_err(|_| PyValueError::new_err("ranks must not be negative"))
}

fn factor<'a>(codes: &'a Codes<'_>) -> PyResult<Factor<'a>> {
    Ok(Factor::Codes {
        codes: contiguous(codes.0.as_slice(), "codes")?,
        scales: contiguous(codes.1.as_slice(), "scales")?,
    })
}

/// Adds integer low-rank compensators to a packed group-wise tensor: W = Wq + U V.
///
/// Args:
///     base: the packed group-wise tensor, uint8 [bytes].
///     ranks: int64 [experts], each at most min(rows, columns); their sum is T.
///     right: (codes uint8 [T, columns], scales float32 [T, ceil(columns / 64)]) of the rows of V, expert by expert; a
///         value is scale * (code - 2^(bits - 1)), and scales are exactly what float16 holds.
///     left: likewise the rows of U^T, [T, rows].
///     bits: 3 or 8.
///
/// Returns:
///     The packed tensor, uint8 [bytes].
///
/// Raises:
///     ValueError: a rank, code, scale or shape is out of range.
///     CorruptionError: `base` is no group-wise tensor.
#[pyfunction]
#[pyo3(signature = (base, ranks, right, left, *, bits))]
pub fn encode_compensated<'py>(
    py: Python<'py>,
    base: PyReadonlyArray1<'py, u8>,
    ranks: PyReadonlyArray1<'py, i64>,
    right: Codes<'py>,
    left: Codes<'py>,
    bits: u8,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let width = match Width::from_bits(bits) {
        Some(width @ (Width::Three | Width::Eight)) => width,
        _ => return Err(PyValueError::new_err(format!("bits must be 3 or 8, not {bits}"))),
    };
    let (ranks, base) = (ranks_of(&ranks)?, contiguous(base.as_slice(), "base")?);
    let (right, left) = (factor(&right)?, factor(&left)?);
    let blob = py.detach(|| compensated::encode(base, &ranks, right, left, width));
    Ok(blob.map_err(raise)?.into_pyarray(py))
}

/// Adds float16 low-rank compensators to a packed group-wise tensor.
///
/// Args:
///     base: the packed group-wise tensor, uint8 [bytes].
///     ranks: int64 [experts], each at most min(rows, columns); their sum is T.
///     right: float32 [T, columns], exactly what float16 holds: the rows of V, expert by expert.
///     left: float32 [T, rows], the rows of U^T.
///
/// Returns:
///     The packed tensor, uint8 [bytes].
///
/// Raises:
///     ValueError: a rank, value or shape is out of range.
///     CorruptionError: `base` is no group-wise tensor.
#[pyfunction]
pub fn encode_compensated_f16<'py>(
    py: Python<'py>,
    base: PyReadonlyArray1<'py, u8>,
    ranks: PyReadonlyArray1<'py, i64>,
    right: PyReadonlyArray2<'py, f32>,
    left: PyReadonlyArray2<'py, f32>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let (ranks, base) = (ranks_of(&ranks)?, contiguous(base.as_slice(), "base")?);
    let right = Factor::Values(contiguous(right.as_slice(), "right")?);
    let left = Factor::Values(contiguous(left.as_slice(), "left")?);
    let blob = py.detach(|| compensated::encode(base, &ranks, right, left, Width::Half));
    Ok(blob.map_err(raise)?.into_pyarray(py))
}

/// A packed group-wise tensor of experts x rows x columns with low-rank compensators, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one packed tensor; it is kept and not copied, and may be a read-only
///         memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: headers, ranks and size contradict each other.
#[pyclass(frozen, module = "moepack._core")]
pub struct CompensatedBlob {
    data: Py<PyArray1<u8>>,
    layout: Layout,
}

impl CompensatedBlob {
    /// Runs `work` on the view without the interpreter lock. Parsing again is cheap: the headers and the ranks.
    fn with_view<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&View) -> Result<T> + Send,
    ) -> PyResult<T> {
        reading(py, &self.data, |data| work(&View::parse(data)?))
    }

    fn shape(&self) -> Shape {
        self.layout.shape()
    }
}

#[pymethods]
impl CompensatedBlob {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<CompensatedBlob> {
        let borrowed = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let layout = View::parse(bytes).map_err(raise)?.layout();
        Ok(CompensatedBlob {
            data: data.clone().unbind(),
            layout,
        })
    }

    /// The bits of a code of the group-wise part: 2, 3, 4 or 8.
    #[getter]
    fn bits(&self) -> u8 {
        self.layout.base().spec().bits
    }

    /// The columns that share a scale in the group-wise part; of one group a row, the columns.
    #[getter]
    fn group_size(&self) -> usize {
        self.layout.base().group_size()
    }

    /// Whether the group-wise part has no offsets.
    #[getter]
    fn symmetric(&self) -> bool {
        self.layout.base().spec().symmetric
    }

    /// The type of the group-wise part's parameters: "float16" or "bfloat16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.base().spec().parameters.name()
    }

    /// The bits of a value of the compensators: 3, 8 or 16.
    #[getter]
    fn rank_bits(&self) -> u8 {
        self.layout.width().bits()
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

    /// The size of the packed tensor in bytes, everything counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.layout.total_bytes()
    }

    /// The rank of each expert's compensator: int64 [experts].
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let experts = self.shape().experts;
        let ranks: Vec<i64> =
            self.with_view(py, |view| Ok((0..experts).map(|e| view.rank(e) as i64).collect()))?;
        Ok(ranks.into_pyarray(py))
    }

    /// The values, compensators added: float32 [experts, rows, columns].
    fn dequantize<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape();
        filled(py, [experts, rows, columns], |values| {
            self.with_view(py, |view| {
                let out = values.par_chunks_exact_mut(columns.max(1)).enumerate();
                pool::current()?.install(|| {
                    out.for_each(|(row, values)| view.decode_values(row / rows, row % rows, values));
                });
                Ok(())
            })
        })
    }

    /// Checks every parameter, scale and padding byte.
    ///
    /// Raises CorruptionError that says where.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify(&*pool::current()?))
    }

    /// y = (Wq + U V) x for one expert: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
    ///     expert: whose weights.
    ///     mode: of the group-wise part: "exact" (the precision of float32) or "int8"; the compensator is always exact.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes do not match, there is no such expert, or the processor lacks the set.
    #[pyo3(signature = (x, expert=0, mode="exact", isa=None))]
    fn matmul<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        expert: usize,
        mode: &str,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (mode, isa) = (Mode::from_name(mode).map_err(raise)?, chosen_isa(isa)?);
        let Shape { rows, columns, .. } = self.shape();
        let [tokens, _] = x.shape();
        products(py, &x, rows, columns, |x, y| {
            self.with_view(py, |view| {
                let weights = Compensated::new(view.clone(), mode, isa)?;
                matmul(&weights, expert, x, tokens, y, &*pool::current()?)
            })
        })
    }

    /// y = (Wq + U V) x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
    ///     mode: of the group-wise part: "exact" (the precision of float32) or "int8"; the compensator is always exact.
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
                let weights = Compensated::new(view.clone(), mode, isa)?;
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
        let (bits, width, bytes) = (self.bits(), self.rank_bits(), self.nbytes());
        let ranks = self.layout.total_rank();
        format!(
            "CompensatedBlob({experts} x {rows} x {columns}, {bits} bits, {ranks} ranks of {width} bits, {bytes} bytes)"
        )
    }
}

impl Packed for CompensatedBlob {
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
        Ok(Box::new(Compensated::new(View::parse(data)?, mode, isa)?))
    }
}
