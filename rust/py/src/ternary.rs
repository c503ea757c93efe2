//! Packed ternary tensors. A blob keeps a reference to a NumPy array and reads it in place.

use moepack_core::formats::ternary::{self, Code, Metadata, TernaryView};
use moepack_core::gemm::layer::Projection;
use moepack_core::gemm::ternary::Ternary;
use moepack_core::gemm::{matmul, matmul_grouped};
use moepack_core::simd::Isa;
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, pool};
use numpy::{Element, IntoPyArray, PyArray1, PyArray2, PyArray3};
use numpy::{PyArrayMethods, PyReadonlyArray1, PyReadonlyArray3, PyUntypedArrayMethods};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, expert_offsets, filled, products, reading};
use crate::error::raise;
use crate::layer::Packed;

/// Encodes ternary codes into a packed tensor.
///
/// Args:
///     codes: int8 [experts, rows, columns], C-contiguous, each -1, 0 or 1.
///     levels: float32 [experts, rows, 2], C-contiguous: the negative (<= 0) and the positive (>= 0) value of a row.
///     ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
///     code: "fsv8" or "dict16" (the dictionary of the QMoE paper, section 4.3).
///
/// Returns:
///     The packed tensor, uint8 [bytes]. It is the same whatever the number of threads.
///
/// Raises:
///     ValueError: a code, level or shape is out of range; the message names expert and row.
#[pyfunction]
#[pyo3(signature = (codes, levels, *, ndim, code="fsv8"))]
pub fn encode_ternary<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray3<'py, i8>,
    levels: PyReadonlyArray3<'py, f32>,
    ndim: u8,
    code: &str,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    let &[experts, rows, columns] = codes.shape() else {
        unreachable!("the type has three axes")
    };
    if levels.shape() != [experts, rows, 2] {
        let message = format!(
            "levels have shape {:?} instead of [{experts}, {rows}, 2]",
            levels.shape()
        );
        return Err(PyValueError::new_err(message));
    }
    let codes = contiguous(codes.as_slice(), "codes")?;
    let levels = contiguous(levels.as_slice(), "levels")?;
    let code = Code::from_name(code).map_err(raise)?;
    let blob = py.detach(|| {
        let (pairs, _) = levels.as_chunks::<2>();
        let levels: Vec<_> = pairs
            .iter()
            .map(|&[negative, positive]| (negative, positive))
            .collect();
        ternary::encode(
            codes,
            &levels,
            Shape {
                experts,
                rows,
                columns,
                ndim,
            },
            code,
            &*pool::current()?,
        )
    });
    Ok(blob.map_err(raise)?.into_pyarray(py))
}

/// A packed ternary tensor of experts x rows x columns, read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one packed tensor; it is kept and not copied, and may be a read-only
///         memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: the header, levels or offsets contradict the format. Codes are checked where they are used.
#[pyclass(frozen, module = "moepack._core")]
pub struct TernaryBlob {
    data: Py<PyArray1<u8>>,
    metadata: Metadata,
}

impl TernaryBlob {
    /// Runs `work` on the view without the interpreter lock.
    fn with_view<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&TernaryView) -> Result<T> + Send,
    ) -> PyResult<T> {
        reading(py, &self.data, |data| {
            work(&TernaryView::again(data, &self.metadata)?)
        })
    }

    /// Fills a new array [experts, rows, columns] without the interpreter lock.
    fn fill<'py, T: Element + Send + Sync>(
        &self,
        py: Python<'py>,
        work: impl FnOnce(&TernaryView, &mut [T]) -> Result<()> + Send,
    ) -> PyResult<Bound<'py, PyArray3<T>>> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.metadata.shape();
        filled(py, [experts, rows, columns], |values| {
            self.with_view(py, |view| work(view, values))
        })
    }

    /// Multiplies activations without the interpreter lock into a new array [tokens, rows].
    fn multiply<'py>(
        &self,
        py: Python<'py>,
        x: &Activations<'py>,
        product: impl FnOnce(&TernaryView, moepack_core::types::Activations, &mut [f32]) -> Result<()> + Send,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let Shape { rows, columns, .. } = self.metadata.shape();
        products(py, x, rows, columns, |x, y| {
            self.with_view(py, |view| product(view, x, y))
        })
    }
}

#[pymethods]
impl TernaryBlob {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<TernaryBlob> {
        let borrowed: PyReadonlyArray1<u8> = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let metadata = data
            .py()
            .detach(|| TernaryView::parse(bytes).map(|view| view.metadata()))
            .map_err(raise)?;
        Ok(TernaryBlob {
            data: data.clone().unbind(),
            metadata,
        })
    }

    /// The entropy code: "fsv8" or "dict16".
    #[getter]
    fn code(&self) -> &'static str {
        self.metadata.code().name()
    }

    /// The number of experts, 1 for a matrix.
    #[getter]
    fn experts(&self) -> usize {
        self.metadata.shape().experts
    }

    /// The number of rows of an expert.
    #[getter]
    fn rows(&self) -> usize {
        self.metadata.shape().rows
    }

    /// The number of columns.
    #[getter]
    fn columns(&self) -> usize {
        self.metadata.shape().columns
    }

    /// Axes of the tensor as its user sees it: 2 or 3.
    #[getter]
    fn ndim(&self) -> u8 {
        self.metadata.shape().ndim
    }

    /// The number of weights that are not zero.
    #[getter]
    fn nonzeros(&self) -> u64 {
        self.metadata.nonzeros()
    }

    /// The size of the packed tensor in bytes, everything counted.
    #[getter]
    fn nbytes(&self) -> usize {
        self.metadata.total_bytes()
    }

    /// The size of the codes alone in bytes.
    #[getter]
    fn payload_bytes(&self) -> usize {
        self.metadata.payload_bytes()
    }

    /// The type of the stored levels: "bfloat16", "float16" or "float32".
    #[getter]
    fn level_dtype(&self) -> &'static str {
        self.metadata.level_type().name()
    }

    /// The codes: int8 [experts, rows, columns] of -1, 0 and 1.
    ///
    /// Raises CorruptionError that names expert, row and byte.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<i8>>> {
        self.fill(py, |view, out| {
            ternary::decode_codes(view, out, &*pool::current()?)
        })
    }

    /// The codes of the rows `start` to `stop` (exclusive) of an expert: int8 [stop - start, columns].
    ///
    /// Raises IndexError for rows that do not exist, CorruptionError as `decode`.
    fn decode_rows<'py>(
        &self,
        py: Python<'py>,
        expert: usize,
        start: usize,
        stop: usize,
    ) -> PyResult<Bound<'py, PyArray2<i8>>> {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.metadata.shape();
        if expert >= experts || start > stop || stop > rows {
            let message = format!("rows {start} to {stop} of expert {expert} in {experts} x {rows}");
            return Err(PyIndexError::new_err(message));
        }
        let out = filled::<i8>(py, [1, stop - start, columns], |codes| {
            self.with_view(py, |view| {
                let mut rows = codes.chunks_exact_mut(columns.max(1));
                (start..stop)
                    .zip(&mut rows)
                    .try_for_each(|(row, codes)| ternary::decode_row(view, expert, row, codes))
            })
        })?;
        out.reshape([stop - start, columns])
    }

    /// The values [experts, rows, columns]: float32, or bfloat16 as its bits in uint16.
    ///
    /// Args:
    ///     dtype: "float32" or "bfloat16" (levels that need more are rounded to nearest even).
    ///
    /// Raises ValueError for another dtype, CorruptionError as `decode`.
    fn dequantize<'py>(&self, py: Python<'py>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
        match dtype {
            "float32" => {
                let values = self.fill(py, |view, out| {
                    ternary::decode_values_f32(view, out, &*pool::current()?)
                });
                Ok(values?.into_any())
            }
            "bfloat16" => {
                let bits = self.fill(py, |view, out| {
                    ternary::decode_values_bf16(view, out, &*pool::current()?)
                });
                Ok(bits?.into_any())
            }
            _ => Err(PyValueError::new_err(format!(
                "dtype {dtype:?} is neither \"float32\" nor \"bfloat16\""
            ))),
        }
    }

    /// The levels: float32 [experts, rows, 2], negative and positive.
    fn levels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray3<f32>>> {
        let Shape { experts, rows, .. } = self.metadata.shape();
        let all = self.with_view(py, |view| {
            Ok((0..experts * rows)
                .flat_map(|row| <[f32; 2]>::from(view.levels(row)))
                .collect::<Vec<_>>())
        })?;
        all.into_pyarray(py).reshape([experts, rows, 2])
    }

    /// Checks every byte: all codes, all offsets, all padding, the number of non-zeros.
    ///
    /// Raises CorruptionError that names expert, row and byte.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.with_view(py, |view| view.verify(&*pool::current()?))
    }

    /// y = W x for one expert, without unpacking W: float32 [tokens, rows], accumulated in float32.
    ///
    /// Args:
    ///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, finite.
    ///     expert: whose weights.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes do not match, there is no such expert, or the processor lacks the set.
    #[pyo3(signature = (x, expert=0, isa=None))]
    fn matmul<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        expert: usize,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (isa, tokens) = (chosen_isa(isa)?, x.shape()[0]);
        self.multiply(py, &x, |view, x, y| {
            let weights = Ternary::new(view.clone(), Mode::Auto, isa)?;
            matmul(&weights, expert, x, tokens, y, &*pool::current()?)
        })
    }

    /// y = W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: as in `matmul`, its tokens sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens: expert e takes the tokens
    ///         `offsets[e]` to `offsets[e + 1]`.
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
        self.multiply(py, &x, |view, x, y| {
            let weights = Ternary::new(view.clone(), Mode::Auto, isa)?;
            matmul_grouped(&weights, x, &offsets, y, &*pool::current()?)
        })
    }

    fn __repr__(&self) -> String {
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.metadata.shape();
        format!(
            "TernaryBlob({experts} x {rows} x {columns}, {}, {} bytes)",
            self.code(),
            self.nbytes()
        )
    }
}

impl Packed for TernaryBlob {
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
        let view = TernaryView::again(data, &self.metadata)?;
        Ok(Box::new(Ternary::new(view, mode, isa)?))
    }
}
