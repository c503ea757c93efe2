//! Least-squares grids of groups.

use moepack_core::pool;
use moepack_core::solvers::fitting::{self as solver, Grid, Problem, Solution, Storage};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyReadwriteArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{chosen_isa, contiguous, zeros};
use crate::error::raise;

type Start<'py> = (PyReadonlyArray2<'py, f32>, PyReadonlyArray2<'py, f32>);
type Answer<'py> = (
    Bound<'py, PyArray2<u8>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray2<f32>>,
    Bound<'py, PyArray1<f64>>,
);

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
#[allow(clippy::too_many_arguments)] // keyword arguments
pub fn fit_groups<'py>(
    py: Python<'py>,
    weights: PyReadonlyArray2<'py, f32>,
    bits: u32,
    group_size: usize,
    symmetric: bool,
    dtype: &str,
    iterations: usize,
    start: Option<Start<'py>>,
    mut compensation: Option<PyReadwriteArray2<'py, f32>>,
    isa: Option<&str>,
) -> PyResult<Answer<'py>> {
    let (storage, isa) = (storage(dtype)?, chosen_isa(isa)?);
    let grid = Grid {
        bits,
        group_size,
        symmetric,
        storage,
        iterations,
    };
    let (rows, columns) = (weights.shape()[0], weights.shape()[1]);
    let groups = grid.groups(columns);
    let codes = zeros::<u8>(py, [1, rows, columns])?.reshape([rows, columns])?;
    let scales = zeros::<f32>(py, [1, rows, groups])?.reshape([rows, groups])?;
    let offsets = zeros::<f32>(py, [1, rows, groups])?.reshape([rows, groups])?;
    let squares = zeros::<f64>(py, [1, 1, rows])?.reshape([rows])?;
    {
        let (mut codes, mut scales) = (codes.try_readwrite()?, scales.try_readwrite()?);
        let (mut offsets, mut squares) = (offsets.try_readwrite()?, squares.try_readwrite()?);
        let problem = Problem {
            weights: contiguous(weights.as_slice(), "weights")?,
            columns,
            start: match &start {
                Some((s, o)) => Some((
                    contiguous(s.as_slice(), "start")?,
                    contiguous(o.as_slice(), "start")?,
                )),
                None => None,
            },
            compensation: match &mut compensation {
                Some(all) => Some(contiguous(all.as_slice_mut(), "compensation")?),
                None => None,
            },
        };
        let solution = Solution {
            codes: contiguous(codes.as_slice_mut(), "codes")?,
            scales: contiguous(scales.as_slice_mut(), "scales")?,
            offsets: contiguous(offsets.as_slice_mut(), "offsets")?,
            squares: contiguous(squares.as_slice_mut(), "squares")?,
        };
        py.detach(|| solver::fit(problem, grid, solution, isa, &*pool::current()?))
            .map_err(raise)?;
    }
    Ok((codes, scales, offsets, squares))
}

fn storage(dtype: &str) -> PyResult<Storage> {
    match dtype {
        "float16" => Ok(Storage::F16),
        "bfloat16" => Ok(Storage::Bf16),
        other => {
            let message = format!("dtype must be float16 or bfloat16, not {other}");
            Err(PyValueError::new_err(message))
        }
    }
}
