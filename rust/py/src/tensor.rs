//! Packed tensors of every format as one Python class.

use moepack_core::gemm::{self, layer::Projection};
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Compute, Details, Floats, Numbers, Tensor, Value};
use moepack_core::types::{Mode, Shape};
use moepack_core::{Result, pool};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict};
use rayon::ThreadPool;

use crate::arrays::{Activations, chosen_isa, contiguous, counts, filled, products};
use crate::error::{detached, invalid, raise};
use crate::packed::Packed;

/// A packed tensor of experts x rows x columns, of any format, opened by its first eight bytes and read in place.
///
/// Args:
///     data: uint8 [bytes], contiguous, exactly one packed tensor; it is referenced and not copied, and may be a
///         read-only memory map. It must not change afterwards.
///
/// Raises:
///     CorruptionError: the header, offsets or size contradict the format. Codes are checked on use.
///     UnknownFormatError: the bytes do not begin with the magic of a known format.
#[pyclass(frozen, weakref, module = "moepack._core")]
pub struct PackedTensor {
    data: Py<PyArray1<u8>>,
    tensor: Box<dyn Tensor>,
}

impl PackedTensor {
    /// Runs `work` on the bytes without the interpreter lock.
    fn reading<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&dyn Tensor, &[u8], &ThreadPool) -> Result<T> + Send,
    ) -> PyResult<T> {
        let data = self.data.bind(py).try_readonly()?;
        let data = contiguous(data.as_slice(), "data")?;
        detached(py, || work(&*self.tensor, data, &*pool::current()?))
    }

    /// The bytes, for owners that keep the tensor.
    ///
    /// # Errors
    /// BufferError if the array is being written to.
    pub fn bytes<'py>(&self, py: Python<'py>) -> PyResult<PyReadonlyArray1<'py, u8>> {
        Ok(self.data.bind(py).try_readonly()?)
    }

    fn dimensions(&self) -> [usize; 3] {
        let shape = self.tensor.shape();
        [shape.experts, shape.rows, shape.columns]
    }

    fn product<'py>(
        &self,
        py: Python<'py>,
        x: &Activations<'py>,
        offsets: &[usize],
        options: (Option<&str>, Option<&str>, Option<u8>),
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (mode, isa, activation_bits) = options;
        let isa = chosen_isa(isa)?;
        let mode = chosen_mode(&*self.tensor, mode).map_err(raise)?;
        let compute = Compute {
            mode,
            activation_bits,
            isa,
        };
        let [_, rows, columns] = self.dimensions();
        products(py, x, rows, columns, |x, y| {
            self.reading(py, |tensor, data, pool| {
                gemm::matmul_grouped(&*tensor.projection(data, compute)?, x, offsets, y, pool)
            })
        })
    }
}

/// The error for an unknown dtype of values.
fn no_dtype<T>(dtype: &str) -> PyResult<T> {
    invalid(format!("dtype {dtype:?} is neither \"float32\" nor \"bfloat16\""))
}

/// The mode with a name, or the tensor's default.
fn chosen_mode(tensor: &dyn Tensor, name: Option<&str>) -> Result<Mode> {
    name.map_or_else(|| Ok(tensor.modes()[0]), Mode::from_name)
}

#[pymethods]
impl PackedTensor {
    #[new]
    fn new(data: &Bound<'_, PyArray1<u8>>) -> PyResult<PackedTensor> {
        let borrowed = data.try_readonly()?;
        let bytes = contiguous(borrowed.as_slice(), "data")?;
        let tensor = detached(data.py(), || tensor::open(bytes))?;
        Ok(PackedTensor {
            data: data.clone().unbind(),
            tensor,
        })
    }

    /// The format's name in manifests: "groupwise".
    #[getter]
    fn kind(&self) -> &'static str {
        self.tensor.format().kind()
    }

    /// The format with the main part of its specification: "groupwise-4bit".
    #[getter]
    fn format(&self) -> String {
        self.tensor.name()
    }

    /// Experts (1 for a matrix), rows and columns.
    #[getter]
    fn shape(&self) -> (usize, usize, usize) {
        self.dimensions().into()
    }

    /// The number of axes that the user sees: 2 or 3.
    #[getter]
    fn ndim(&self) -> u8 {
        self.tensor.shape().ndim
    }

    /// The size of the packed tensor in bytes, everything included.
    #[getter]
    fn nbytes(&self) -> usize {
        self.tensor.bytes()
    }

    /// The supported compute modes, the default first.
    #[getter]
    fn modes(&self) -> Vec<&'static str> {
        self.tensor.modes().iter().map(|mode| mode.name()).collect()
    }

    /// Return the tensor's specification besides its shape: JSON values by name, in a fixed order.
    fn details<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let details = PyDict::new(py);
        for (name, value) in self.tensor.details().iter() {
            match value {
                Value::Flag(flag) => details.set_item(name, flag)?,
                Value::Integer(number) => details.set_item(name, number)?,
                Value::Text(text) => details.set_item(name, text)?,
            }
        }
        Ok(details)
    }

    /// Return the parts of the format: name -> (offset, bytes), in order, without the header.
    fn sections<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let sections = PyDict::new(py);
        for (name, place) in self.tensor.sections() {
            sections.set_item(name, (place.start, place.len()))?;
        }
        Ok(sections)
    }

    /// Return the byte range of each expert's codes: int64 [experts, 2], start and end. Opening the tensor and
    /// products with other experts do not read it.
    fn payloads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let runs = self.reading(py, |tensor, data, _| tensor::payloads(tensor, data))?;
        let ends: Vec<i64> = runs
            .iter()
            .flat_map(|run| [run.start as i64, run.end as i64])
            .collect();
        ends.into_pyarray(py)
            .into_any()
            .call_method1("reshape", ((runs.len(), 2),))
    }

    /// Return the codes [experts, rows, columns]: int8 for ternary and coded tensors, uint8 for others.
    ///
    /// Raises CorruptionError that names the position, ValueError if a byte does not hold a code.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let codes: Bound<'py, PyArray3<u8>> = filled(py, self.dimensions(), |out| {
            self.reading(py, |tensor, data, pool| tensor.decode(data, out, pool))
        })?;
        match self.tensor.has_signed_codes() {
            true => codes.call_method1("view", ("int8",)),
            false => Ok(codes.into_any()),
        }
    }

    /// Return the values [experts, rows, columns]: float32, or bfloat16 (rounded to nearest even) as bits in uint16.
    ///
    /// Raises ValueError for another dtype, CorruptionError that names the position.
    #[pyo3(signature = (dtype="float32"))]
    fn dequantize<'py>(&self, py: Python<'py>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
        let shape = self.dimensions();
        let read = |out: Floats| self.reading(py, |tensor, data, pool| tensor.dequantize(data, out, pool));
        match dtype {
            "float32" => {
                let values: Bound<PyArray3<f32>> = filled(py, shape, |out| read(Floats::F32(out)))?;
                Ok(values.into_any())
            }
            "bfloat16" => {
                let bits: Bound<PyArray3<u16>> = filled(py, shape, |out| read(Floats::Bf16(out)))?;
                Ok(bits.into_any())
            }
            _ => no_dtype(dtype),
        }
    }

    /// Return the values of some rows, [n, columns], without decoding the others, for embeddings of tokens.
    ///
    /// Args:
    ///     rows: [n] int64, counted over all experts, in any order and with repetitions.
    ///     dtype: "float32", or "bfloat16" as bits in uint16.
    ///
    /// Raises ValueError if a row does not exist, the dtype is unknown, or the format does not support it.
    #[pyo3(signature = (rows, dtype="float32"))]
    fn look_up<'py>(&self, rows: PyReadonlyArray1<'py, i64>, dtype: &str) -> PyResult<Bound<'py, PyAny>> {
        let py = rows.py();
        let rows = counts(&rows, "rows")?;
        let shape = [rows.len(), self.tensor.shape().columns];
        let read =
            |out: Floats| self.reading(py, |tensor, data, pool| tensor.look_up(data, &rows, out, pool));
        match dtype {
            "float32" => {
                let values: Bound<PyArray2<f32>> = filled(py, shape, |out| read(Floats::F32(out)))?;
                Ok(values.into_any())
            }
            "bfloat16" => {
                let bits: Bound<PyArray2<u16>> = filled(py, shape, |out| read(Floats::Bf16(out)))?;
                Ok(bits.into_any())
            }
            _ => no_dtype(dtype),
        }
    }

    /// Return the stored parameters of a name: float32, or int64 for ranks.
    ///
    /// Args:
    ///     name: "levels" [experts, rows, 2], negative and positive, of ternary tensors; "scales" and, unless they are
    ///         symmetric, "offsets" [experts, rows, groups] of group-wise ones; in addition "ranks" [experts] and, with
    ///         T for the sum of the ranks, "right" [T, columns] and "left" [T, rows] of compensated ones; "scales"
    ///         [experts, rows, blocks] and "centroids" [experts, rows, blocks, 2^bits] of codebooks; "scales"
    ///         [experts, rows] or [1, 1] of coded ones.
    ///
    /// Raises ValueError if the tensor has no such parameters.
    fn parameters<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let found = self.reading(py, |tensor, data, pool| tensor.parameters(data, name, pool))?;
        let flat = match found.values {
            Numbers::F32(values) => values.into_pyarray(py).into_any(),
            Numbers::I64(values) => values.into_pyarray(py).into_any(),
        };
        flat.call_method1("reshape", (found.shape,))
    }

    /// Check every byte: codes, parameters, offsets, padding.
    ///
    /// Raises CorruptionError that names the position.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.reading(py, |tensor, data, pool| tensor.verify(data, pool))
    }

    /// Return y = W x for one expert, without unpacking W: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: float32, or bfloat16 as bits in uint16; [tokens, columns], C-contiguous.
    ///     expert: the expert's index.
    ///     mode: one of `modes`, by default "exact", or the mode that a codebook tensor is designed for.
    ///     isa: the instruction set, by default the active one.
    ///     activation_bits: bits of rounded activations for codebook tensors, 4 or 8; by default the tensor's, or 8.
    ///
    /// Raises ValueError if sizes do not match, the expert or mode does not exist, or the processor lacks the set.
    #[pyo3(signature = (x, expert=0, mode=None, isa=None, activation_bits=None))]
    fn matmul<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        expert: usize,
        mode: Option<&str>,
        isa: Option<&str>,
        activation_bits: Option<u8>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let ([experts, ..], [tokens, _]) = (self.dimensions(), x.shape());
        if expert >= experts {
            return invalid(format!("there is no expert {expert} of {experts}"));
        }
        let offsets: Vec<_> = (0..=experts)
            .map(|e| if e > expert { tokens } else { 0 })
            .collect();
        self.product(py, &x, &offsets, (mode, isa, activation_bits))
    }

    /// Return y = W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].
    ///
    /// Args:
    ///     x: as in `matmul`, with tokens sorted by expert.
    ///     offsets: int64 [experts + 1], ascending from 0 to the number of tokens: expert e takes the tokens
    ///         `offsets[e]` to `offsets[e + 1]`.
    ///     mode, isa, activation_bits: as in `matmul`.
    ///
    /// Raises ValueError if sizes or offsets do not match, the mode does not exist, or the processor lacks the set.
    #[pyo3(signature = (x, offsets, mode=None, isa=None, activation_bits=None))]
    fn matmul_grouped<'py>(
        &self,
        py: Python<'py>,
        x: Activations<'py>,
        offsets: PyReadonlyArray1<'py, i64>,
        mode: Option<&str>,
        isa: Option<&str>,
        activation_bits: Option<u8>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        self.product(
            py,
            &x,
            &counts(&offsets, "offsets")?,
            (mode, isa, activation_bits),
        )
    }

    /// Return x' = W^T y with each expert's own tokens: float32 [tokens, columns]. Weights are decoded 64 rows at a
    /// time, and sums run in f32 over the rows in ascending order.
    ///
    /// Args:
    ///     y: float32, or bfloat16 as bits in uint16; [tokens, rows], C-contiguous, with tokens sorted by expert.
    ///     offsets: as in `matmul_grouped`.
    ///     isa: the instruction set, by default the active one.
    ///
    /// Raises ValueError if sizes or offsets do not match, or the processor lacks the set; CorruptionError if codes
    /// contradict the format.
    #[pyo3(signature = (y, offsets, isa=None))]
    fn matmul_transposed<'py>(
        &self,
        py: Python<'py>,
        y: Activations<'py>,
        offsets: PyReadonlyArray1<'py, i64>,
        isa: Option<&str>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (isa, offsets) = (chosen_isa(isa)?, counts(&offsets, "offsets")?);
        let [_, rows, columns] = self.dimensions();
        products(py, &y, columns, rows, |y, x| {
            self.reading(py, |tensor, data, pool| {
                gemm::matmul_transposed((tensor, data), y, &offsets, x, isa, pool)
            })
        })
    }

    fn __repr__(&self) -> String {
        let [experts, rows, columns] = self.dimensions();
        format!(
            "PackedTensor({}, {experts} x {rows} x {columns}, {} bytes)",
            self.format(),
            self.nbytes()
        )
    }
}

impl Packed for PackedTensor {
    fn array(&self) -> &Py<PyArray1<u8>> {
        &self.data
    }

    fn projection<'a>(
        &'a self,
        data: &'a [u8],
        mode: Option<&str>,
        isa: Isa,
    ) -> Result<Box<dyn Projection + 'a>> {
        let mode = chosen_mode(&*self.tensor, mode)?;
        self.tensor.projection(
            data,
            Compute {
                mode,
                activation_bits: None,
                isa,
            },
        )
    }
}

/// Return the packed formats: kind, magic and version of each.
#[pyfunction]
pub fn formats(py: Python<'_>) -> Vec<(&'static str, Bound<'_, PyBytes>, u16)> {
    let formats = tensor::formats().into_iter();
    formats
        .map(|format| (format.kind(), PyBytes::new(py, &format.magic()), format.version()))
        .collect()
}

/// Return the size in bytes of a packed tensor, everything included.
///
/// Args:
///     kind: the kind, as in `formats`; not one whose size depends on its codes.
///     shape: experts, rows, columns.
///     specification: as in `PackedTensor.details`: bits, group_size, symmetric; for a compensated tensor also
///         rank_bits and total_rank; for codebooks bits, block_size, activation_bits.
///
/// Raises ValueError if the kind or the tensor does not exist, TypeError if a value is not a bool, a number or a
/// string.
#[pyfunction]
#[pyo3(signature = (kind, shape, **specification))]
pub fn packed_bytes(
    kind: &str,
    shape: (usize, usize, usize),
    specification: Option<&Bound<'_, PyDict>>,
) -> PyResult<usize> {
    let (experts, rows, columns) = shape;
    let shape = Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    };
    let mut details = Details::default();
    for (name, value) in specification.into_iter().flatten() {
        let value: Value = match value.cast::<PyBool>() {
            Ok(flag) => flag.is_true().into(),
            Err(_) => match value.extract::<u64>() {
                Ok(number) => number.into(),
                Err(_) => value.extract::<&str>()?.into(),
            },
        };
        details = details.with(name.extract()?, value);
    }
    tensor::format(kind)
        .and_then(|format| format.bytes(shape, &details))
        .map_err(raise)
}
