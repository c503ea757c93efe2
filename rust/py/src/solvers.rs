//! Solvers that are written in Rust: clustering, refinement of codebooks, least-squares grids.

use moepack_core::solvers::{clustering, fitting, kmeans as clusters_of_rows, priced};
use moepack_core::{pool, simd};
use numpy::{IntoPyArray, PyReadonlyArray4, PyReadwriteArray2};
use numpy::{PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray2, PyReadonlyArray3};
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, contiguous, lengths, optional, places, values, zeros};
use crate::error::{invalid, raise};

type Floats<'py> = Bound<'py, PyArray2<f32>>;
type Codes<'py> = Bound<'py, PyArray2<u8>>;
type Sums<'py> = Bound<'py, PyArray1<f64>>;

/// Clusters the values of each row so that the weighted sum of squared errors is least.
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

/// Rounds weights to integers with the length of their code in mind.
#[pyfunction]
#[pyo3(signature = (weights, lengths, *, step, price, width=1.0, isa=None))]
pub fn round_priced<'py>(
    py: Python<'py>,
    weights: Activations<'py>,
    lengths: PyReadonlyArray2<'py, f32>,
    step: f64,
    price: f64,
    width: f64,
    isa: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let ([rows, columns], [_, integers]) = (weights.shape(), crate::arrays::lengths(&*lengths));
    let isa = chosen_isa(isa)?;
    let problem = priced::Problem {
        weights: weights.values()?,
        columns,
        step,
        width,
        lengths: values(&lengths, "lengths")?,
        integers,
        price,
    };
    let found = py
        .detach(|| priced::round(problem, isa, &*pool::current()?))
        .map_err(raise)?;
    Ok(match found {
        priced::Integers::I8(found) => found.into_pyarray(py).reshape([rows, columns])?.into_any(),
        priced::Integers::I16(found) => found.into_pyarray(py).reshape([rows, columns])?.into_any(),
        priced::Integers::I32(found) => found.into_pyarray(py).reshape([rows, columns])?.into_any(),
    })
}

fn storage(dtype: &str) -> PyResult<fitting::Storage> {
    match dtype {
        "float16" => Ok(fitting::Storage::F16),
        "bfloat16" => Ok(fitting::Storage::Bf16),
        other => invalid(format!("dtype must be float16 or bfloat16, not {other}")),
    }
}
