//! Solvers written in Rust: clustering, refinement of codebooks, least-squares grids.

use moepack_core::simd::Isa;
use moepack_core::solvers::{
    clustering, fitting, kmeans as clusters_of_rows, ladder, priced, samples, trellis,
};
use moepack_core::{Result, pool, simd};
use numpy::{IntoPyArray, PyReadonlyArray4, PyReadwriteArray2};
use numpy::{
    PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3,
};
use pyo3::prelude::*;
use rayon::ThreadPool;

use crate::arrays::{Activations, chosen_isa, contiguous, lengths, optional, places, values, zeros};
use crate::encode::Integers;
use crate::error::{invalid, raise};

type Floats<'py> = Bound<'py, PyArray2<f32>>;
type Counts<'py> = PyResult<Vec<(usize, Bound<'py, PyArray1<u64>>)>>;
type Codes<'py> = Bound<'py, PyArray2<u8>>;
type Sums<'py> = Bound<'py, PyArray1<f64>>;

/// Cluster the values of each row with the lowest weighted sum of squared errors.
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

/// Refine codes and centroids of rows on their output error (q - t) H (q - t)^T.
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
        _ => return invalid("pass either factors or points, not both"),
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

/// Find codes, scales and offsets of least squared error: `scale * code + offset` for each row and group of columns.
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

/// Find the scale of each group that explains most of its energy, out of a ladder of trial scales.
#[pyfunction]
#[pyo3(signature = (weights, group_size, factors, *, codes, isa=None))]
pub fn search_scales<'py>(
    py: Python<'py>,
    weights: PyReadonlyArray2<'py, f32>,
    group_size: usize,
    factors: PyReadonlyArray1<'py, f32>,
    codes: (f32, f32),
    isa: Option<&str>,
) -> PyResult<Floats<'py>> {
    let isa = chosen_isa(isa)?;
    let [rows, columns] = lengths(&*weights);
    let ladder = ladder::Ladder {
        factors: values(&factors, "factors")?,
        codes: codes.into(),
    };
    let found = zeros(py, [rows, columns / group_size.max(1)])?;
    {
        let (mut scales, weights) = (found.try_readwrite()?, values(&weights, "weights")?);
        let scales = places(&mut scales)?;
        py.detach(|| {
            ladder::search(
                weights,
                columns,
                group_size,
                ladder,
                scales,
                isa,
                &*pool::current()?,
            )
        })
        .map_err(raise)?;
    }
    Ok(found)
}

/// Output integers of any width.
#[derive(FromPyObject)]
pub enum Places<'py> {
    #[pyo3(transparent)]
    Bytes(PyReadwriteArray2<'py, i8>),
    #[pyo3(transparent)]
    Shorts(PyReadwriteArray2<'py, i16>),
    #[pyo3(transparent)]
    Words(PyReadwriteArray2<'py, i32>),
}

/// Round weights to integers, with the lengths of their codes taken into account.
#[pyfunction]
#[pyo3(signature = (weights, lengths, out, *, step, price, width=1.0, dependent=false))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn round_priced(
    py: Python<'_>,
    weights: Activations<'_>,
    lengths: PyReadonlyArray2<'_, f32>,
    mut out: Places<'_>,
    step: f64,
    price: f64,
    width: f64,
    dependent: bool,
) -> PyResult<i32> {
    let ([_, columns], [_, integers]) = (weights.shape(), crate::arrays::lengths(&*lengths));
    let problem = priced::Problem {
        weights: weights.values()?,
        columns,
        step,
        width,
        lengths: values(&lengths, "lengths")?,
        integers,
        price,
    };
    match &mut out {
        Places::Bytes(out) => rounded(py, problem, places(out)?, dependent),
        Places::Shorts(out) => rounded(py, problem, places(out)?, dependent),
        Places::Words(out) => rounded(py, problem, places(out)?, dependent),
    }
}

fn rounded<T: priced::Integer>(
    py: Python<'_>,
    problem: priced::Problem,
    out: &mut [T],
    dependent: bool,
) -> PyResult<i32> {
    let isa = chosen_isa(None)?;
    let round = if dependent { trellis::round } else { priced::round };
    py.detach(|| round(problem, out, isa, &*pool::current()?))
        .map_err(raise)
}

/// Round samples of many matrices, each with code lengths and a price of its own.
#[pyfunction]
#[pyo3(signature = (samples, lengths, prices, *, dependent=false))]
pub fn round_samples<'py>(
    py: Python<'py>,
    samples: PyReadonlyArray3<'py, f32>,
    lengths: PyReadonlyArray2<'py, f32>,
    prices: PyReadonlyArray1<'py, f32>,
    dependent: bool,
) -> PyResult<Bound<'py, PyArray3<i32>>> {
    let (shape, isa) = (crate::arrays::lengths(&*samples), chosen_isa(None)?);
    let given = samples::Samples {
        shape,
        values: values(&samples, "samples")?,
        lengths: values(&lengths, "lengths")?,
        prices: values(&prices, "prices")?,
        dependent,
    };
    let codes = py
        .detach(|| samples::round(given, isa, &*pool::current()?))
        .map_err(raise)?;
    codes.into_pyarray(py).reshape(shape)
}

/// Count weights by the class of their root mean square and by value.
#[pyfunction]
#[pyo3(signature = (values, *, classes, bins, reach))]
pub fn count_values<'py>(
    py: Python<'py>,
    values: PyReadonlyArray2<'py, f32>,
    classes: usize,
    bins: usize,
    reach: f32,
) -> Counts<'py> {
    counted(py, &values, classes, |rows, isa, pool| {
        priced::count::values(rows, bins, reach, isa, pool)
    })
}

/// Count the integers of rounded weights by the weights' class.
#[pyfunction]
#[pyo3(signature = (values, integers, *, classes, largest))]
pub fn count_integers<'py>(
    py: Python<'py>,
    values: PyReadonlyArray2<'py, f32>,
    integers: Integers<'py>,
    classes: usize,
    largest: u16,
) -> Counts<'py> {
    match &integers {
        Integers::Bytes(given) => counted_integers(py, &values, given, classes, largest),
        Integers::Shorts(given) => counted_integers(py, &values, given, classes, largest),
        Integers::Words(given) => counted_integers(py, &values, given, classes, largest),
    }
}

fn counted_integers<'py, T: priced::Integer + numpy::Element>(
    py: Python<'py>,
    rows: &PyReadonlyArray2<'py, f32>,
    integers: &PyReadonlyArray3<'py, T>,
    classes: usize,
    largest: u16,
) -> Counts<'py> {
    let integers = values(integers, "integers")?;
    counted(py, rows, classes, |rows, isa, pool| {
        priced::count::integers(rows, integers, largest, isa, pool)
    })
}

/// Count the symbols of codes by run of rows.
#[pyfunction]
#[pyo3(signature = (codes, runs, *, number, largest, dependent=false))]
pub fn count_symbols<'py>(
    py: Python<'py>,
    codes: Integers<'py>,
    runs: PyReadonlyArray2<'py, i64>,
    number: usize,
    largest: u16,
    dependent: bool,
) -> PyResult<Bound<'py, PyArray2<f64>>> {
    let found = match &codes {
        Integers::Bytes(given) => counted_symbols(py, given, &runs, number, largest, dependent),
        Integers::Shorts(given) => counted_symbols(py, given, &runs, number, largest, dependent),
        Integers::Words(given) => counted_symbols(py, given, &runs, number, largest, dependent),
    }?;
    let found: Vec<f64> = found.into_iter().map(|count| count as f64).collect();
    found
        .into_pyarray(py)
        .reshape([number, 2 * usize::from(largest) + 3])
}

fn counted_symbols<'py, T: priced::Integer + numpy::Element>(
    py: Python<'py>,
    codes: &PyReadonlyArray3<'py, T>,
    runs: &PyReadonlyArray2<'py, i64>,
    number: usize,
    largest: u16,
    dependent: bool,
) -> PyResult<Vec<u64>> {
    let [_, _, columns] = lengths(&**codes);
    let coded = priced::count::Coded {
        codes: values(codes, "codes")?,
        columns,
        runs: values(runs, "runs")?,
        number,
        dependent,
    };
    py.detach(|| priced::count::symbols(coded, largest, &*pool::current()?))
        .map_err(raise)
}

/// The counts of each class.
fn counted<'py>(
    py: Python<'py>,
    rows: &PyReadonlyArray2<'py, f32>,
    classes: usize,
    count: impl FnOnce(priced::count::Rows, Isa, &ThreadPool) -> Result<priced::count::Counts> + Send,
) -> Counts<'py> {
    let [_, columns] = lengths(&**rows);
    let rows = priced::count::Rows {
        values: values(rows, "values")?,
        columns,
        classes,
    };
    let isa = chosen_isa(None)?;
    let found = py
        .detach(|| count(rows, isa, &*pool::current()?))
        .map_err(raise)?;
    let found = found.into_iter();
    Ok(found
        .map(|(class, counts)| (class, counts.into_pyarray(py)))
        .collect())
}

/// Find dependent codes with error compensation.
#[pyfunction]
#[pyo3(signature = (weights, upper, pivots, prices, lengths, runs, *, step))]
#[allow(clippy::too_many_arguments)] // Python's signature
#[allow(clippy::type_complexity)]
pub fn solve_dependent<'py>(
    py: Python<'py>,
    weights: PyReadonlyArray3<'py, f32>,
    upper: PyReadonlyArray3<'py, f32>,
    pivots: PyReadonlyArray2<'py, f32>,
    prices: PyReadonlyArray1<'py, f32>,
    lengths: PyReadonlyArray2<'py, f32>,
    runs: PyReadonlyArray2<'py, i64>,
    step: f64,
) -> PyResult<(Bound<'py, PyArray3<i32>>, Bound<'py, PyArray2<f64>>)> {
    let (shape, isa) = (crate::arrays::lengths(&*weights), chosen_isa(None)?);
    let [experts, _, columns] = shape;
    let [_, indices] = crate::arrays::lengths(&*lengths);
    let matrices = trellis::Matrices {
        shape,
        weights: values(&weights, "weights")?,
        step,
        upper: values(&upper, "upper")?,
        pivots: values(&pivots, "pivots")?,
        prices: values(&prices, "prices")?,
        lengths: values(&lengths, "lengths")?,
        indices,
        runs: values(&runs, "runs")?,
    };
    let solved = py
        .detach(|| trellis::solve(matrices, isa, &*pool::current()?))
        .map_err(raise)?;
    Ok((
        solved.codes.into_pyarray(py).reshape(shape)?,
        solved.losses.into_pyarray(py).reshape([experts, columns])?,
    ))
}

fn storage(dtype: &str) -> PyResult<fitting::Storage> {
    match dtype {
        "float16" => Ok(fitting::Storage::F16),
        "bfloat16" => Ok(fitting::Storage::Bf16),
        other => invalid(format!("dtype must be float16 or bfloat16, not {other}")),
    }
}
