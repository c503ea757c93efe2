//! Exact one-dimensional k-means.

use moepack_core::pool;
use moepack_core::solvers::kmeans::{self as solver, Problem, Solution};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::arrays::{contiguous, zeros};
use crate::error::raise;

type Answer<'py> = (
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<u8>>,
    Bound<'py, PyArray1<f64>>,
);

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
) -> PyResult<Answer<'py>> {
    let (rows, columns) = (values.shape()[0], values.shape()[1]);
    let problem = Problem {
        values: contiguous(values.as_slice(), "values")?,
        weights: match &weights {
            Some(weights) => contiguous(weights.as_slice(), "weights")?,
            None => &[],
        },
        columns,
        clusters,
    };
    let centroids = zeros::<f32>(py, [1, rows, clusters])?.reshape([rows, clusters])?;
    let codes = zeros::<u8>(py, [1, rows, columns])?.reshape([rows, columns])?;
    let errors = zeros::<f64>(py, [1, 1, rows])?.reshape([rows])?;
    {
        let (mut centroids, mut codes, mut errors) = (
            centroids.try_readwrite()?,
            codes.try_readwrite()?,
            errors.try_readwrite()?,
        );
        let solution = Solution {
            centroids: contiguous(centroids.as_slice_mut(), "centroids")?,
            codes: contiguous(codes.as_slice_mut(), "codes")?,
            errors: contiguous(errors.as_slice_mut(), "errors")?,
        };
        py.detach(|| solver::kmeans(problem, solution, &*pool::current()?))
            .map_err(raise)?;
    }
    Ok((centroids, codes, errors))
}
