//! A layer of gated experts with projections of any format.

use moepack_core::formats::channels::View;
use moepack_core::gemm::layer::{Layer, Routing};
use moepack_core::gemm::sparse::{self, Ups};
use moepack_core::pool;
use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray2, PyReadonlyArray3, PyReadwriteArray3};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::{Activations, chosen_isa, lengths, places, products, values};
use crate::dense::DenseMatrix;
use crate::error::detached;
pub use crate::packed::Packed;
use crate::streaming::Channels;
use crate::tensor::PackedTensor;

/// Converts an object to a tensor: a `PackedTensor` or a `DenseMatrix`.
pub fn packed<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a dyn Packed> {
    if let Ok(tensor) = object.cast::<PackedTensor>() {
        return Ok(tensor.get());
    }
    if let Ok(matrix) = object.cast::<DenseMatrix>() {
        return Ok(matrix.get());
    }
    let kind = object.get_type();
    Err(PyTypeError::new_err(format!(
        "{kind} is not a tensor that layers can use"
    )))
}

/// Compute a layer of gated experts in one call: for each token the sum over its experts of weight * down(silu(gate
/// x) * up x), float32 [tokens, columns].
///
/// Args:
///     gate, up: packed tensors of experts x hidden x columns, of any format.
///     down: experts x columns x hidden.
///     x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
///     experts: int64 [tokens, top_k], C-contiguous; numbers that are not valid experts are skipped.
///     weights: float32 [tokens, top_k], C-contiguous.
///     modes: the modes of gate, up and down, as in `matmul_grouped`; None is the format's default.
///     isa: the instruction set, by default the active one.
///
/// Raises:
///     TypeError: a projection is not a packed tensor.
///     ValueError: sizes do not match, a format has no such mode, or the processor lacks the set.
#[pyfunction]
#[pyo3(signature = (gate, up, down, x, experts, weights, modes=[None, None, None], isa=None))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn gated_experts<'py>(
    py: Python<'py>,
    gate: &Bound<'py, PyAny>,
    up: &Bound<'py, PyAny>,
    down: &Bound<'py, PyAny>,
    x: Activations<'py>,
    experts: PyReadonlyArray2<'py, i64>,
    weights: PyReadonlyArray2<'py, f32>,
    modes: [Option<String>; 3],
    isa: Option<&str>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let tensors = [packed(gate)?, packed(up)?, packed(down)?];
    let (isa, routing) = (chosen_isa(isa)?, routing(&experts, &weights)?);
    let [gate, up, down] = tensors.map(|tensor| tensor.array().bind(py).try_readonly());
    let arrays = [gate?, up?, down?];
    let [gate, up, down] = arrays.each_ref().map(|array| values(array, "data"));
    let data = [gate?, up?, down?];
    let projection = |i: usize| tensors[i].projection(data[i], modes[i].as_deref(), isa);
    let columns = x.shape()[1];
    products(py, &x, columns, columns, |x, y| {
        let forward = || {
            let (gate, up, down) = (projection(0)?, projection(1)?, projection(2)?);
            let layer = Layer::new(&*gate, &*up, &*down);
            layer.forward(x, routing, y, isa, &*pool::current()?)
        };
        detached(py, forward)
    })
}

/// Compute a layer of experts whose channels are selected by thresholds, in one call: for each token the sum over its
/// experts and their channels c with |u_c| >= threshold of weight * silu(gate_c x) * u_c * down_c, where u = up x.
///
/// Args:
///     up: packed tensor of experts x hidden x columns, of any format.
///     channels: packed channels of experts x hidden x 2 columns.
///     x, experts, weights, isa: as for `gated_experts`.
///     mode: the mode of the up projection.
///
/// Returns:
///     The sums, float32 [tokens, columns], and the number of computed channels, over all tokens and their experts.
///
/// Raises:
///     CorruptionError: `channels` has another format.
///     ValueError: sizes do not match, a format has no such mode, or the processor lacks the set.
#[pyfunction]
#[pyo3(signature = (up, channels, x, experts, weights, mode=None, isa=None))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn sparse_experts<'py>(
    py: Python<'py>,
    up: &PackedTensor,
    channels: &PackedTensor,
    x: Activations<'py>,
    experts: PyReadonlyArray2<'py, i64>,
    weights: PyReadonlyArray2<'py, f32>,
    mode: Option<&str>,
    isa: Option<&str>,
) -> PyResult<(Bound<'py, PyArray2<f32>>, u64)> {
    let (isa, routing) = (chosen_isa(isa)?, routing(&experts, &weights)?);
    let [first, second] = [up, channels].map(|tensor| tensor.array().bind(py).try_readonly());
    let (first, second) = (first?, second?);
    let (data, records) = (values(&first, "data")?, values(&second, "data")?);
    let (columns, mut computed) = (x.shape()[1], 0);
    let y = products(py, &x, columns, columns, |x, y| {
        let forward = || {
            let up = up.projection(data, mode, isa)?;
            let layer = sparse::Layer {
                ups: Ups::Of(&*up),
                channels: View::parse(records)?,
            };
            layer.forward(x, routing, y, isa, &*pool::current()?)
        };
        computed = detached(py, forward)?;
        Ok(())
    })?;
    Ok((y, computed))
}

/// Compute a layer of experts whose channels are selected by given outputs of the up projection: for each token the
/// sum over its experts and their channels c with u_c not zero of weight * silu(gate_c x) * u_c * down_c.
///
/// Args:
///     channels: packed or streamed; the selected records of streamed channels must be in memory.
///     x, experts, weights, isa: as for `sparse_experts`.
///     ups: u, float32 [tokens, top_k, hidden], C-contiguous; zero for skipped channels.
///
/// Returns and raises: as `sparse_experts`; also ValueError if a record is not in memory.
#[pyfunction]
#[pyo3(signature = (channels, x, experts, weights, ups, isa=None))]
pub fn sparse_channels<'py>(
    py: Python<'py>,
    channels: &Bound<'py, PyAny>,
    x: Activations<'py>,
    experts: PyReadonlyArray2<'py, i64>,
    weights: PyReadonlyArray2<'py, f32>,
    ups: PyReadonlyArray3<'py, f32>,
    isa: Option<&str>,
) -> PyResult<(Bound<'py, PyArray2<f32>>, u64)> {
    let (isa, routing) = (chosen_isa(isa)?, routing(&experts, &weights)?);
    let channels = Channels::of(channels)?;
    let (channels, ups) = (channels.source()?, values(&ups, "ups")?);
    let (columns, mut computed) = (x.shape()[1], 0);
    let y = products(py, &x, columns, columns, |x, y| {
        let forward = |channels: View| {
            let ups = Ups::Given(ups);
            sparse::Layer { ups, channels }.forward(x, routing, y, isa, &*pool::current()?)
        };
        computed = detached(py, || channels.view(forward))?;
        Ok(())
    })?;
    Ok((y, computed))
}

/// Compute the contributions of records to coarse copies of a layer; records hold the differences of finer gates and
/// down projections.
///
/// Args:
///     channels, x, experts, weights, ups, isa: as for `sparse_channels`.
///     gates: g, float32 [tokens, top_k, hidden], the outputs of the coarse gates.
///     inner: float32 [tokens, top_k, hidden], C-contiguous; if u_c is not zero it becomes h_c = silu(g_c + gate_c x) * u_c.
///
/// Returns: for each token the sum over its experts and those channels of weight * h_c * down_c, and their number.
///
/// Raises: as `sparse_experts`.
#[pyfunction]
#[pyo3(signature = (channels, x, experts, weights, ups, gates, inner, isa=None))]
#[allow(clippy::too_many_arguments)] // Python's signature
pub fn refine_channels<'py>(
    py: Python<'py>,
    channels: &Bound<'py, PyAny>,
    x: Activations<'py>,
    experts: PyReadonlyArray2<'py, i64>,
    weights: PyReadonlyArray2<'py, f32>,
    ups: PyReadonlyArray3<'py, f32>,
    gates: PyReadonlyArray3<'py, f32>,
    mut inner: PyReadwriteArray3<'py, f32>,
    isa: Option<&str>,
) -> PyResult<(Bound<'py, PyArray2<f32>>, u64)> {
    let (isa, routing) = (chosen_isa(isa)?, routing(&experts, &weights)?);
    let channels = Channels::of(channels)?;
    let (channels, ups, gates) = (channels.source()?, values(&ups, "ups")?, values(&gates, "gates")?);
    let (columns, inner, mut computed) = (x.shape()[1], places(&mut inner)?, 0);
    let y = products(py, &x, columns, columns, |x, y| {
        let forward = |channels: View| {
            let ups = Ups::Refining { ups, gates };
            sparse::Layer { ups, channels }.refine(x, routing, y, inner, isa, &*pool::current()?)
        };
        computed = detached(py, || channels.view(forward))?;
        Ok(())
    })?;
    Ok((y, computed))
}

fn routing<'a>(
    experts: &'a PyReadonlyArray2<'_, i64>,
    weights: &'a PyReadonlyArray2<'_, f32>,
) -> PyResult<Routing<'a>> {
    Ok(Routing {
        experts: values(experts, "experts")?,
        weights: values(weights, "weights")?,
        top_k: lengths::<_, 2>(&**experts)[1],
    })
}
