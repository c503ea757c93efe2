//! Solvers that are written in Rust: clustering, refinement of codebooks, least-squares grids.

use moepack_core::solvers::{clustering, fitting, kmeans as clusters_of_rows};
use moepack_core::{pool, simd};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray2, PyReadonlyArray3};
use numpy::{PyReadonlyArray4, PyReadwriteArray2};
use pyo3::prelude::*;

use crate::arrays::{chosen_isa, contiguous, lengths, optional, places, values, zeros};
use crate::error::{invalid, raise};

type Floats<'py> = Bound<'py, PyArray2<f32>>;
type Codes<'py> = Bound<'py, PyArray2<u8>>;
type Sums<'py> = Bound<'py, PyArray1<f64>>;

/// Clusters the values of each row so that the weighted sum of squared errors is least.
///
/// Args:
///     values: float32 [rows, columns], C-contiguous, finite.
///     clusters: 1 to 16.
///     weights: float32 [groups, columns], C-contiguous, finite, none negative: the importance of each column, for rows /
///         groups successive rows at a time; by default 1.
///
/// Returns:
///     Centroids, float32 [rows, clusters], ascending; codes of the nearest centroid, uint8 [rows, columns]; errors,
///     float64 [rows].
///
/// Raises:
///     ValueError: sizes do not match, or a value or weight is out of range.
#[pyfunction]
#[pyo3(signature = (values, clusters, weights=None))]
pub fn kmeans<'py>(
    py: Python<'py>,
    values: PyReadonlyArray2<'py, f32>,
    clusters: usize,
    weights: Option<PyReadonlyArray2<'py, f32>>,
) -> PyResult<(Floats<'py>, Codes<'py>, Sums<'py>)> {
    let [rows, columns] = lengths(&*values);
    let problem = clusters_of_rows::Problem {
        values: contiguous(values.as_slice(), "values")?,
        weights: optional(&weights, "weights")?.unwrap_or_default(),
        columns,
        clusters,
    };
    let found = (
        zeros(py, [rows, clusters])?,
        zeros(py, [rows, columns])?,
        zeros(py, [rows])?,
    );
    {
        let (mut centroids, mut codes) = (found.0.try_readwrite()?, found.1.try_readwrite()?);
        let mut errors = found.2.try_readwrite()?;
        let solution = clusters_of_rows::Solution {
            centroids: places(&mut centroids)?,
            codes: places(&mut codes)?,
            errors: places(&mut errors)?,
        };
        py.detach(|| clusters_of_rows::kmeans(problem, solution, &*pool::current()?))
            .map_err(raise)?;
    }
    Ok(found)
}

/// Refines codes and centroids of rows on their output error (q - t) H (q - t)^T.
///
/// Args:
///     targets: float32 [experts, rows, columns], C-contiguous: t.
///     hessians: float32 [experts, columns, columns], C-contiguous: H, symmetric.
///     codes: uint8 [experts, rows, columns], C-contiguous: the start.
///     centroids: float32 [experts, rows, blocks, clusters], C-contiguous, ascending: the start.
///     block: columns that share a codebook.
///     steps: how often assignments and centroids are improved.
///     factors: float32 [experts, columns, columns], C-contiguous: unit upper triangular factors of the Hessians, to
///         round with error feedback in the first step.
///     points: float32 as the targets: assign to the centroids nearest to these instead of column by column.
///
/// Returns:
///     Codes and centroids, flat; the objectives, float64 [experts, rows, steps + 1], which never rise.
///
/// Raises:
///     ValueError: sizes do not match, a code is no cluster's, or both factors and points are given.
#[pyfunction]
#[pyo3(signature = (targets, hessians, codes, centroids, *, block, steps, factors=None, points=None))]
#[allow(clippy::too_many_arguments)] // Python's signature
#[allow(clippy::type_complexity)]
pub fn refine_codebooks<'py>(
    py: Python<'py>,
    targets: PyReadonlyArray3<'py, f32>,
    hessians: PyReadonlyArray3<'py, f32>,
    codes: PyReadonlyArray3<'py, u8>,
    centroids: PyReadonlyArray4<'py, f32>,
    block: usize,
    steps: usize,
    factors: Option<PyReadonlyArray3<'py, f32>>,
    points: Option<PyReadonlyArray3<'py, f32>>,
) -> PyResult<(
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray3<f64>>,
)> {
    let (shape, [.., clusters]) = (lengths(&*targets), lengths::<_, 4>(&*centroids));
    let assignment = match (optional(&factors, "factors")?, optional(&points, "points")?) {
        (factors, None) => clustering::Assignment::Coordinate(factors.unwrap_or_default()),
        (None, Some(points)) => clustering::Assignment::Diagonal(points),
        _ => return invalid("either factors or points"),
    };
    let problem = clustering::Problem {
        targets: values(&targets, "targets")?,
        hessians: values(&hessians, "hessians")?,
        assignment,
        shape,
        block,
        clusters,
        steps,
    };
    let (mut codes, mut centroids) = (
        values(&codes, "codes")?.to_vec(),
        values(&centroids, "centroids")?.to_vec(),
    );
    let objectives = zeros(py, [shape[0], shape[1], steps + 1])?;
    let mut written = objectives.try_readwrite()?;
    let state = clustering::State {
        codes: &mut codes,
        centroids: &mut centroids,
        objectives: places(&mut written)?,
    };
    py.detach(|| clustering::refine(problem, state, simd::active()?, &*pool::current()?))
        .map_err(raise)?;
    drop(written);
    Ok((
        PyArray1::from_vec(py, codes),
        PyArray1::from_vec(py, centroids),
        objectives,
    ))
}

/// Finds codes, scales and offsets of least squared error: `scale * code + offset` for each row and group of columns.
///
/// Args:
///     weights: float32 [rows, columns], C-contiguous.
///     bits: of a code, 1 to 8.
///     group_size: columns that share parameters.
///     symmetric: offsets are -2^(bits - 1) times the scales.
///     dtype: "float16" or "bfloat16", what parameters are rounded to.
///     iterations: most regressions.
///     start: scales and offsets, float32 [rows, groups], to start from instead of a search.
///     compensation: float32 [rows, columns], what something else adds to the codes' values; it is overwritten by the
///         weights less the codes' values.
///     isa: the instruction set, by default the active one; the result does not depend on it.
///
/// Returns:
///     Codes, uint8 [rows, columns]; scales and offsets, float32 [rows, groups]; the squared norms of the weights less
///     the codes' values, float64 [rows].
///
/// Raises:
///     ValueError: sizes do not match, an array is not contiguous, or the processor lacks the set.
#[pyfunction]
#[pyo3(signature = (weights, bits, group_size, *, symmetric=false, dtype="float16", iterations=8, start=None, compensation=None, isa=None))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn fit_groups<'py>(
    py: Python<'py>,
    weights: PyReadonlyArray2<'py, f32>,
    bits: u32,
    group_size: usize,
    symmetric: bool,
    dtype: &str,
    iterations: usize,
    start: Option<(PyReadonlyArray2<'py, f32>, PyReadonlyArray2<'py, f32>)>,
    mut compensation: Option<PyReadwriteArray2<'py, f32>>,
    isa: Option<&str>,
) -> PyResult<(Codes<'py>, Floats<'py>, Floats<'py>, Sums<'py>)> {
    let (storage, isa) = (storage(dtype)?, chosen_isa(isa)?);
    let grid = fitting::Grid {
        bits,
        group_size,
        symmetric,
        storage,
        iterations,
    };
    let [rows, columns] = lengths(&*weights);
    let places_of_groups = [rows, grid.groups(columns)];
    let (codes, squares) = (zeros(py, [rows, columns])?, zeros(py, [rows])?);
    let found = (
        codes,
        zeros(py, places_of_groups)?,
        zeros(py, places_of_groups)?,
        squares,
    );
    {
        let (mut codes, mut scales) = (found.0.try_readwrite()?, found.1.try_readwrite()?);
        let (mut offsets, mut squares) = (found.2.try_readwrite()?, found.3.try_readwrite()?);
        let start = start
            .as_ref()
            .map(|(s, o)| PyResult::Ok((values(s, "start")?, values(o, "start")?)));
        let compensation = compensation
            .as_mut()
            .map(|all| contiguous(all.as_slice_mut(), "compensation"));
        let problem = fitting::Problem {
            weights: values(&weights, "weights")?,
            columns,
            start: start.transpose()?,
            compensation: compensation.transpose()?,
        };
        let solution = fitting::Solution {
            codes: places(&mut codes)?,
            scales: places(&mut scales)?,
            offsets: places(&mut offsets)?,
            squares: places(&mut squares)?,
        };
        py.detach(|| fitting::fit(problem, grid, solution, isa, &*pool::current()?))
            .map_err(raise)?;
    }
    Ok(found)
}

fn storage(dtype: &str) -> PyResult<fitting::Storage> {
    match dtype {
        "float16" => Ok(fitting::Storage::F16),
        "bfloat16" => Ok(fitting::Storage::Bf16),
        other => invalid(format!("dtype must be float16 or bfloat16, not {other}")),
    }
}
