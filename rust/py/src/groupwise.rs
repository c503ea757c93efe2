//! Packed group-wise tensors. A blob keeps a reference to a NumPy array and reads it in place.

use moepack_core::formats::groupwise::{self, Layout, ParameterType, Spec, View};
use moepack_core::gemm::groupwise::Groupwise;
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::{matmul, matmul_grouped};
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, bits, pool};
use numpy::{Element, IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods};
use numpy::{PyReadonlyArray1, PyReadonlyArray3, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rayon::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, filled, products, reading};
use crate::error::raise;
use crate::layer::Packed;

/// Packs 3-bit codes, 32 of them in three words.
///
/// Args:
///     codes: uint8 [n], C-contiguous, 0 to 7; n is a multiple of 32.
///
/// Returns:
///     uint32 [3 * n / 32].
///
/// Raises:
///     ValueError: a code or n is out of range.
#[pyfunction]
pub fn pack_int3<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
    let codes = contiguous(codes.as_slice(), "codes")?;
    let words = py.detach(|| bits::pack_all(3, codes)).map_err(raise)?;
    Ok(words.into_pyarray(py))
}

/// The inverse of `pack_int3`.
///
/// Args:
///     words: uint32 [n], C-contiguous; n is a multiple of 3.
///
/// Returns:
///     uint8 [32 * n / 3].
///
/// Raises:
///     ValueError: n is no multiple of 3.
#[pyfunction]
pub fn unpack_int3<'py>(
    py: Python<'py>,
    words: PyReadonlyArray1<'py, u32>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let words = contiguous(words.as_slice(), "words")?;
    let codes = py.detach(|| bits::unpack_all(3, words)).map_err(raise)?;
    Ok(codes.into_pyarray(py))
}

/// Packs group-wise codes.
///
/// Args:
///     codes: uint8 [experts, rows, columns], C-contiguous, below 2^bits.
///     scales: float32 [experts, rows, groups], C-contiguous, exactly what `dtype` holds, finite.
///     offsets: the same, or None for a symmetric tensor, whose weights are scale * (code - 2^(bits - 1)).
///     bits: 2, 3, 4 or 8.
///     group_size: columns a group: 16, 32, 64, 128, 256, or at least the columns, which means one group a row.
///     ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
///     dtype: of the stored parameters, "float16" or "bfloat16".
///
/// Returns:
///     The packed tensor, uint8 [bytes].
///
/// Raises:
///     ValueError: a code, parameter, setting or shape is out of range.
#[pyfunction]
#[pyo3(signature = (codes, scales, offsets, *, bits, group_size, ndim, dtype="float16"))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn encode_groupwise<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray3<'py, u8>,
    scales: PyReadonlyArray3<'py, f32>,
    offsets: Option<PyReadonlyArray3<'py, f32>>,
    bits: u8,
    group_size: usize,
    ndim: u8,
    dtype: &str,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let &[experts, rows, columns] = codes.shape() else {
        unreachable!("the type has three axes")
    };
    let shape = Shape {
        experts,
        rows,
        columns,
        ndim,
    };
    let spec = Spec {
        bits,
        group: group_size,
        symmetric: offsets.is_none(),
        parameters: ParameterType::from_name(dtype).map_err(raise)?,
    };
    if group_size == 0 {
        return Err(PyValueError::new_err("group_size must be positive"));
    }
    let codes = contiguous(codes.as_slice(), "codes")?;
    let scales = contiguous(scales.as_slice(), "scales")?;
    let offsets = match &offsets {
        Some(offsets) => Some(contiguous(offsets.as_slice(), "offsets")?),
        None => None,
    };
    let blob = py.detach(|| groupwise::encode(codes, scales, offsets, shape, spec, &*pool::current()?));
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
        reading(py, &self.data, |data| work(&View::parse(data)?))
    }

    /// Fills a new array [experts, rows, width] row by row without the interpreter lock.
    fn fill<'py, T: Element + Send + Sync>(
        &self,
        py: Python<'py>,
        width: usize,
        work: impl Fn(&View, usize, &mut [T]) + Send + Sync,
    ) -> PyResult<Bound<'py, PyArray3<T>>> {
        let Shape { experts, rows, .. } = self.layout.shape();
        filled(py, [experts, rows, width], |values| {
            self.with_view(py, |view| {
                let rows = values.par_chunks_exact_mut(width.max(1)).enumerate();
                pool::current()?.install(|| rows.for_each(|(row, values)| work(view, row, values)));
                Ok(())
            })
        })
    }
}

#[pymethods]
impl GroupwiseBlob {
    #[new]
    pub(crate) fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<GroupwiseBlob> {
        let borrowed: PyReadonlyArray1<u8> = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let layout = View::parse(bytes).map_err(raise)?.layout();
        Ok(GroupwiseBlob {
            data: data.clone().unbind(),
            layout,
        })
    }

    /// The bits of a code: 2, 3, 4 or 8.
    #[getter]
    fn bits(&self) -> u8 {
        self.layout.spec().bits
    }

    /// The columns that share a scale; of one group a row, the columns.
    #[getter]
    fn group_size(&self) -> usize {
        self.layout.group_size()
    }

    /// Whether weights are scale * (code - 2^(bits - 1)), without offsets.
    #[getter]
    fn symmetric(&self) -> bool {
        self.layout.spec().symmetric
    }

    /// The type of the stored parameters: "float16" or "bfloat16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.spec().parameters.name()
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
    pub(crate) fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<u8>>> {
        let columns = self.layout.shape().columns;
        self.fill(py, columns, |view, row, codes| view.decode_row(row, codes))
    }

    /// The values: float32 [experts, rows, columns].
    pub(crate) fn dequantize<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let columns = self.layout.shape().columns;
        self.fill(py, columns, |view, row, values| view.decode_values(row, values))
    }

    /// The scales: float32 [experts, rows, groups].
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        self.fill(py, self.layout.groups(), |view, row, values| {
            values
                .iter_mut()
                .enumerate()
                .for_each(|(group, value)| *value = view.parameters(row, group).0)
        })
    }

    /// The offsets: float32 [experts, rows, groups], or None for a symmetric tensor.
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray3<f32>>>> {
        if self.layout.spec().symmetric {
            return Ok(None);
        }
        let offsets = self.fill(py, self.layout.groups(), |view, row, values| {
            values
                .iter_mut()
                .enumerate()
                .for_each(|(group, value)| *value = view.parameters(row, group).1)
        });
        offsets.map(Some)
    }

    /// Checks every parameter and padding byte.
    ///
    /// Raises CorruptionError that names expert and row.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify(&*pool::current()?))
    }

    /// y = W x for one expert: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
    ///     expert: whose weights.
    ///     mode: "exact" (the precision of float32), "int8" (quantized for each token and group of columns) or "bf16"
    ///         (rounded; few tokens exactly).
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
        let Shape { rows, columns, .. } = self.layout.shape();
        let [tokens, _] = x.shape();
        products(py, &x, rows, columns, |x, y| {
            self.with_view(py, |view| {
                let weights = Groupwise::new(view, mode, isa)?;
                matmul(&weights, expert, x, tokens, y, &*pool::current()?)
            })
        })
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
        let Shape { rows, columns, .. } = self.layout.shape();
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
        } = self.layout.shape();
        let (bits, group, bytes) = (self.bits(), self.group_size(), self.nbytes());
        format!(
            "GroupwiseBlob({experts} x {rows} x {columns}, {bits} bits, groups of {group}, {bytes} bytes)"
        )
    }
}

impl Packed for GroupwiseBlob {
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
        Ok(Box::new(Groupwise::new(View::parse(data)?, mode, isa)?))
    }
}
