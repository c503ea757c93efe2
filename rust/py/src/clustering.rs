//! Codes and centroids refined on the error of a matrix's outputs.

use moepack_core::pool;
use moepack_core::solvers::clustering::{self as solver, Assignment, Problem, State};
use numpy::{PyArray1, PyArray3, PyArrayMethods, PyReadonlyArray3, PyReadonlyArray4, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arrays::contiguous;
use crate::error::raise;

type Answer<'py> = (
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray3<f64>>,
);

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
#[allow(clippy::too_many_arguments)]
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
) -> PyResult<Answer<'py>> {
    let shape = [targets.shape()[0], targets.shape()[1], targets.shape()[2]];
    let assignment = match (&factors, &points) {
        (None, None) => Assignment::Coordinate(&[]),
        (Some(factors), None) => Assignment::Coordinate(contiguous(factors.as_slice(), "factors")?),
        (None, Some(points)) => Assignment::Diagonal(contiguous(points.as_slice(), "points")?),
        _ => {
            return Err(pyo3::exceptions::PyValueError::new_err(
                "either factors or points",
            ));
        }
    };
    let problem = Problem {
        targets: contiguous(targets.as_slice(), "targets")?,
        hessians: contiguous(hessians.as_slice(), "hessians")?,
        assignment,
        shape,
        block,
        clusters: centroids.shape()[3],
        steps,
    };
    let mut codes = contiguous(codes.as_slice(), "codes")?.to_vec();
    let mut centroids = contiguous(centroids.as_slice(), "centroids")?.to_vec();
    let mut objectives = vec![0.0; shape[0] * shape[1] * (steps + 1)];
    let state = State {
        codes: &mut codes,
        centroids: &mut centroids,
        objectives: &mut objectives,
    };
    py.detach(|| solver::refine(problem, state, moepack_core::simd::active()?, &*pool::current()?))
        .map_err(raise)?;
    let objectives = PyArray1::from_vec(py, objectives).reshape([shape[0], shape[1], steps + 1])?;
    Ok((
        PyArray1::from_vec(py, codes),
        PyArray1::from_vec(py, centroids),
        objectives,
    ))
}
