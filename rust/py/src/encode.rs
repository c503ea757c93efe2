//! Packing: functions that convert codes and parameters to the bytes of a packed tensor, uint8 [bytes].

use moepack_core::formats::compensated::chunk::Width;
use moepack_core::formats::compensated::{self, Factor};
use moepack_core::formats::groupwise::{self, ParameterType, Spec};
use moepack_core::formats::{channels, codebook, coded, ternary};
use moepack_core::types::Shape;
use moepack_core::{Result, bits, pool, simd};
use numpy::PyUntypedArrayMethods;
use numpy::{
    IntoPyArray, PyArray1, PyArray3, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3, PyReadonlyArray4,
};
use pyo3::prelude::*;

use crate::arrays::{counts, filled, lengths, optional, values};
use crate::error::{invalid, raise};

type Bytes<'py> = PyResult<Bound<'py, PyArray1<u8>>>;

/// Runs `work` without the interpreter lock and returns the packed bytes.
fn packed(py: Python<'_>, work: impl FnOnce() -> Result<Vec<u8>> + Send) -> Bytes<'_> {
    Ok(py.detach(work).map_err(raise)?.into_pyarray(py))
}

fn shape<T: numpy::Element>(codes: &PyReadonlyArray3<'_, T>, ndim: u8) -> Shape {
    let [experts, rows, columns] = lengths(&**codes);
    Shape {
        experts,
        rows,
        columns,
        ndim,
    }
}

/// Encode ternary codes.
#[pyfunction]
#[pyo3(signature = (codes, levels, *, ndim, code="fsv8"))]
pub fn encode_ternary<'py>(
    py: Python<'py>,
    codes: PyReadonlyArray3<'py, i8>,
    levels: PyReadonlyArray3<'py, f32>,
    ndim: u8,
    code: &str,
) -> Bytes<'py> {
    let shape = shape(&codes, ndim);
    let Shape { experts, rows, .. } = shape;
    if levels.shape() != [experts, rows, 2] {
        return invalid(format!(
            "levels have shape {:?} instead of [{experts}, {rows}, 2]",
            levels.shape()
        ));
    }
    let (codes, levels) = (values(&codes, "codes")?, values(&levels, "levels")?);
    let code = ternary::Code::from_name(code).map_err(raise)?;
    packed(py, || {
        let levels: Vec<_> = levels
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&pair| pair.into())
            .collect();
        ternary::encode(codes, &levels, shape, code, &*pool::current()?)
    })
}

/// Pack group-wise codes.
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
) -> Bytes<'py> {
    let shape = shape(&codes, ndim);
    let spec = Spec {
        bits,
        group: group_size,
        symmetric: offsets.is_none(),
        parameters: ParameterType::from_name(dtype).map_err(raise)?,
    };
    if group_size == 0 {
        return invalid("group_size must be positive");
    }
    let (codes, scales) = (values(&codes, "codes")?, values(&scales, "scales")?);
    let offsets = optional(&offsets, "offsets")?;
    packed(py, || {
        groupwise::encode(codes, scales, offsets, shape, spec, &*pool::current()?)
    })
}

/// Pack codes and codebooks. A weight is `scale * centroid[code]`.
#[pyfunction]
#[pyo3(signature = (codes, centroids, scales, *, bits, block, ndim, activation_bits=0, hadamard=1))]
#[allow(clippy::too_many_arguments)] // Python's signature
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
) -> Bytes<'py> {
    let given = [codes.shape(), centroids.shape(), scales.shape()];
    if given[0][..2] != given[1][..2] || given[1][..3] != *given[2] {
        let [codes, centroids, scales] = given;
        return invalid(format!(
            "centroids {centroids:?} and scales {scales:?} do not match codes {codes:?}"
        ));
    }
    let content = codebook::Content {
        shape: shape(&codes, ndim),
        bits,
        activation_bits,
        block,
        hadamard,
        codes: values(&codes, "codes")?,
        centroids: values(&centroids, "centroids")?,
        scales: values(&scales, "scales")?,
    };
    packed(py, || codebook::encode(content, &*pool::current()?))
}

/// Integers of any width.
#[derive(FromPyObject)]
pub enum Integers<'py> {
    #[pyo3(transparent)]
    Bytes(PyReadonlyArray3<'py, i8>),
    #[pyo3(transparent)]
    Shorts(PyReadonlyArray3<'py, i16>),
    #[pyo3(transparent)]
    Words(PyReadonlyArray3<'py, i32>),
}

/// The rows of a stream, and what symbols stand for.
type Form = (Option<usize>, coded::Symbols);

/// Scales of rows and of columns.
type GivenScales<'a, 'py> = (
    &'a PyReadonlyArray2<'py, f32>,
    &'a Option<PyReadonlyArray2<'py, f32>>,
);

/// Entropy code integers.
#[allow(clippy::too_many_arguments)] // the arguments are keywords in Python
#[pyfunction]
#[pyo3(signature = (codes, scales, *, ndim, columns=None, stream_rows=None, symbols="plain"))]
pub fn encode_coded<'py>(
    py: Python<'py>,
    codes: Integers<'py>,
    scales: PyReadonlyArray2<'py, f32>,
    ndim: u8,
    columns: Option<PyReadonlyArray2<'py, f32>>,
    stream_rows: Option<usize>,
    symbols: &str,
) -> Bytes<'py> {
    let form = (stream_rows, symbols.parse().map_err(raise)?);
    let scales = (&scales, &columns);
    match &codes {
        Integers::Bytes(codes) => encode_integers(py, codes, scales, ndim, form),
        Integers::Shorts(codes) => encode_integers(py, codes, scales, ndim, form),
        Integers::Words(codes) => encode_integers(py, codes, scales, ndim, form),
    }
}

fn encode_integers<'py, T: coded::Code + numpy::Element>(
    py: Python<'py>,
    codes: &PyReadonlyArray3<'py, T>,
    (scales, columns): GivenScales<'_, 'py>,
    ndim: u8,
    (stream_rows, symbols): Form,
) -> Bytes<'py> {
    let shape = shape(codes, ndim);
    if ![[1, 1], [shape.experts, shape.rows]]
        .iter()
        .any(|wanted| scales.shape() == wanted)
    {
        return invalid(format!(
            "scales have shape {:?} instead of [{}, {}] or [1, 1]",
            scales.shape(),
            shape.experts,
            shape.rows
        ));
    }
    if let Some(columns) = columns
        && ![1, shape.experts]
            .iter()
            .any(|&rows| columns.shape() == [rows, shape.columns])
    {
        return invalid(format!(
            "columns have shape {:?} instead of [1, {}] or [{}, {}]",
            columns.shape(),
            shape.columns,
            shape.experts,
            shape.columns
        ));
    }
    let codes = values(codes, "codes")?;
    let scales = coded::Scales {
        rows: values(scales, "scales")?,
        columns: optional(columns, "columns")?,
    };
    packed(py, || {
        let pool = &*pool::current()?;
        coded::encode(codes, scales, shape, stream_rows, symbols, pool)
    })
}

/// Return the codes of a coded tensor.
#[pyfunction]
pub fn decode_coded<'py>(
    py: Python<'py>,
    data: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyArray3<i32>>> {
    let data = values(&data, "data")?;
    let coded = coded::Coded::parse(data).map_err(raise)?;
    let Shape {
        experts,
        rows,
        columns,
        ..
    } = coded.layout().shape();
    filled(py, [experts, rows, columns], |out| {
        let put = |_, codes: &[i32], out: &mut [i32]| {
            out.copy_from_slice(codes);
            Ok(())
        };
        py.detach(|| {
            let isa = simd::active()?;
            coded.view(data)?.decode_rows(isa, out, &*pool::current()?, put)
        })
        .map_err(raise)
    })
}

/// The values of records: codes and scales, or the bits of bf16 values.
#[derive(FromPyObject)]
pub enum Records<'py> {
    Integers(PyReadonlyArray3<'py, u8>, PyReadonlyArray3<'py, f32>),
    #[pyo3(transparent)]
    Bf16(PyReadonlyArray3<'py, u16>),
}

/// Pack gate rows and down columns by channels.
#[pyfunction]
#[pyo3(signature = (records, thresholds, *, bits))]
pub fn encode_channels<'py>(
    py: Python<'py>,
    records: Records<'py>,
    thresholds: PyReadonlyArray1<'py, f32>,
    bits: u8,
) -> Bytes<'py> {
    let thresholds = values(&thresholds, "thresholds")?;
    let (content, shape) = match &records {
        Records::Integers(codes, scales) => {
            let (given, scales) = (values(codes, "codes")?, values(scales, "scales")?);
            let content = channels::Content::Integers {
                bits,
                codes: given,
                scales,
            };
            (content, shape(codes, 3))
        }
        Records::Bf16(_) if bits != 16 => {
            return invalid(format!("values of {bits} bits need codes and scales"));
        }
        Records::Bf16(bits) => (channels::Content::Bf16(values(bits, "values")?), shape(bits, 3)),
    };
    packed(py, || {
        channels::encode(content, thresholds, shape, &*pool::current()?)
    })
}

/// The rows of one factor: codes [T, n] and scales [T, ceil(n / 64)], or values [T, n].
#[derive(FromPyObject)]
pub enum Rows<'py> {
    Codes(PyReadonlyArray2<'py, u8>, PyReadonlyArray2<'py, f32>),
    #[pyo3(transparent)]
    Values(PyReadonlyArray2<'py, f32>),
}

impl Rows<'_> {
    fn factor(&self, name: &str) -> PyResult<Factor<'_>> {
        Ok(match self {
            Rows::Codes(codes, scales) => Factor::Codes {
                codes: values(codes, name)?,
                scales: values(scales, name)?,
            },
            Rows::Values(rows) => Factor::Values(values(rows, name)?),
        })
    }
}

/// Add low-rank compensators to a packed group-wise tensor: W = Wq + U V.
#[pyfunction]
#[pyo3(signature = (base, ranks, right, left, *, bits))]
pub fn encode_compensated<'py>(
    py: Python<'py>,
    base: PyReadonlyArray1<'py, u8>,
    ranks: PyReadonlyArray1<'py, i64>,
    right: Rows<'py>,
    left: Rows<'py>,
    bits: u8,
) -> Bytes<'py> {
    let Some(width) = Width::from_bits(bits) else {
        return invalid(format!("bits must be 3, 8 or 16, not {bits}"));
    };
    let (ranks, base) = (counts(&ranks, "ranks")?, values(&base, "base")?);
    let (right, left) = (right.factor("right")?, left.factor("left")?);
    packed(py, || compensated::encode(base, &ranks, right, left, width))
}

/// Pack 3-bit codes, 32 of them in three words.
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
    let codes = values(&codes, "codes")?;
    Ok(py
        .detach(|| bits::pack_all(3, codes))
        .map_err(raise)?
        .into_pyarray(py))
}

/// Undo `pack_int3`: uint32 [n], C-contiguous, to uint8 [32 * n / 3].
///
/// Raises:
///     ValueError: n is not a multiple of 3.
#[pyfunction]
pub fn unpack_int3<'py>(py: Python<'py>, words: PyReadonlyArray1<'py, u32>) -> Bytes<'py> {
    let words = values(&words, "words")?;
    packed(py, || bits::unpack_all(3, words))
}
