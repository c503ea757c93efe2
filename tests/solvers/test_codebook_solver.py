"""Clustering on the output error against float64 definitions, and rounded activations against the kernels."""

import numpy as np
import pytest
import torch

from moepack import _core
from moepack.codebook import CodebookTensor, encode_codebook
from moepack.errors import InvalidTensorError
from moepack.solvers.activations import Rounding, block_width, rotated, round_activations
from moepack.solvers.codebooks import ClusterSettings, cluster, look_up
from moepack.solvers.fixed_point import fixed_point
from moepack.solvers.kmeans import kmeans


def problem(experts=2, rows=6, columns=40, tokens=200, seed=0):
    """Weights, correlated inputs of the compressed model, H and D."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(experts, rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.3
    x = torch.randn(experts, tokens, columns, generator=generator) @ mix
    before = x + 0.1 * torch.randn(x.shape, generator=generator) + 0.05 * x.roll(1, -1)
    return weights, x, before, x.mT @ x, (before - x).mT @ x


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [None, 16, 33])
def test_refinement_lowers_the_output_error(bits, block):
    weights, x, before, hessians, drift = problem()
    target = weights.double() @ (hessians + drift).double() @ torch.linalg.inv(hessians.double())
    least = (before @ weights.mT - (x.double() @ target.mT)).square().sum()
    errors, objectives = {}, {}
    for assignment, steps in (("columns", 0), ("columns", 4), ("diagonal", 4)):
        settings = ClusterSettings(bits, block, steps=steps, assignment=assignment, damping=1e-3, drift=1.0)
        found = cluster(weights, hessians, drift, settings)
        assert found.codes.shape == weights.shape and int(found.codes.max()) < 1 << bits
        assert found.centroids.shape[-2:] == (-(-40 // (block or 40)), 1 << bits)
        values = look_up(found.codes, found.centroids, block)
        errors[assignment, steps] = (before @ weights.mT - x @ values.mT).double().square().sum() - least
        objectives[assignment, steps] = found.objectives
        assert (found.objectives.diff(dim=-1) <= 0).all()
    if bits == 4 and block == 16:  # as many centroids as weights
        assert objectives["columns", 0].max() < 1e-6
        return
    assert errors["columns", 4] < 0.8 * errors["columns", 0]
    assert errors["diagonal", 4] <= errors["columns", 0]
    assert (objectives["columns", 4][:, -1] < objectives["diagonal", 4][:, -1]).all()


def test_the_objective_is_the_output_error_up_to_a_constant():
    weights, x, before, hessians, drift = problem(experts=1)
    found = [
        cluster(weights, hessians, drift, ClusterSettings(2, None, steps=steps, damping=1e-6, drift=1.0))
        for steps in (0, 3)
    ]
    output = [(before @ weights.mT - x @ look_up(f.codes, f.centroids, None).mT).double().square().sum() for f in found]
    target = weights.double() @ (hessians + drift).double() @ torch.linalg.inv(hessians.double())
    energy = (x.double() @ target.mT).square().sum()
    expected = (output[0] - output[1]) / energy
    assert float(found[0].objectives[0, -1] - found[1].objectives[0, -1]) == pytest.approx(float(expected), rel=1e-3)


def test_equation_8_keeps_both_inputs_apart():
    """If X and X~ differ by a factor per column, the points of equation 8 are the weights times that factor."""
    weights, _, _, hessians, _ = problem(experts=1)
    hessians = torch.diag_embed(hessians.diagonal(dim1=1, dim2=2))
    factor = torch.linspace(0.5, 2, 40)
    drift = hessians * (factor - 1)
    settings = ClusterSettings(4, None, steps=0, assignment="diagonal", damping=1e-9, drift=1.0)
    start = cluster(weights, hessians, drift, settings)
    expected = kmeans(weights * factor, 16, hessians.diagonal(dim1=1, dim2=2))
    assert (start.codes == expected.codes).float().mean() > 0.99
    same = cluster(weights, hessians, torch.zeros_like(drift), settings)
    assert (same.codes != start.codes).any()
    first = cluster(
        weights, hessians, drift, ClusterSettings(4, None, steps=3, assignment="diagonal", damping=1e-9, drift=1.0)
    )
    assert float(first.objectives[0, -1]) <= float(start.objectives[0, -1])


@pytest.mark.parametrize("assignment", ["columns", "diagonal"])
def test_rows_that_are_odd(assignment):
    weights, _, _, hessians, drift = problem(experts=1)
    weights[0, 0] = 0.25
    weights[0, 1] = torch.where(torch.arange(40) < 20, -1.0, 2.0)
    weights[0, 2, 7] = 1e4
    weights[0, 3] = 0
    settings = ClusterSettings(4, None, steps=3, assignment=assignment, drift=0.0)
    found = cluster(weights, hessians, drift, settings)
    values = look_up(found.codes, found.centroids, None)
    torch.testing.assert_close(values[0, [0, 1, 3]], weights[0, [0, 1, 3]], rtol=1e-4, atol=1e-5)
    assert abs(float(values[0, 2, 7]) - 1e4) < 5
    assert values.isfinite().all()
    assert encode_codebook(found.codes[0], found.centroids[0]).dequantize().isfinite().all()


def test_experts_without_inputs_fall_back_to_plain_clustering():
    weights, _, _, hessians, drift = problem()
    hessians[0], drift[0] = 0, 0
    found = cluster(weights, hessians, drift, ClusterSettings(3))
    assert found.reasons == ["no token reached the expert", None]
    plain = kmeans(weights[0], 8).values()
    values = look_up(found.codes, found.centroids, None)
    assert (values[0] - weights[0]).square().sum() <= 1.01 * (plain - weights[0]).square().sum()
    hessians[1, 3, 3] = torch.nan
    assert cluster(weights, hessians, drift, ClusterSettings(3)).reasons[1] == "the Hessian is not finite"
    weights[0, 0, 0] = torch.inf
    with pytest.raises(InvalidTensorError):
        cluster(weights, hessians, drift, ClusterSettings(3))


def test_centroids_of_8_bits_lose_nothing_more_in_the_integer_mode():
    weights, x, _, hessians, drift = problem(experts=1)
    found = cluster(weights, hessians, drift, ClusterSettings(4, centroid_bits=8))
    stored = fixed_point(found.centroids, 8)
    blob = _core.encode_codebook(
        found.codes.numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=4, block=128, ndim=2
    )
    tensor = CodebookTensor(blob)
    torch.testing.assert_close(tensor.dequantize(), look_up(found.codes, found.centroids, None)[0], rtol=1e-6, atol=0)
    for bits in (4, 8):
        expected = round_activations(x[0], bits) @ tensor.dequantize().T
        torch.testing.assert_close(tensor.matmul(x[0], "int8", bits), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_are_rounded_as_the_kernels_do(bits):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 128, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    x[0], x[1], x[2, 5], x[3] = 0, x[1].abs() + 1, 1e4, -x[3].abs()
    rounded = round_activations(x, bits)
    # Row i has a single non-zero weight, in column i: products are single activations.
    codes = torch.eye(128, dtype=torch.uint8)
    tensor = encode_codebook(codes, torch.tensor([0.0, 1, 1, 1]).expand(128, 4))
    torch.testing.assert_close(torch.from_numpy(tensor.matmul(x.numpy(), "int16", bits)), rounded, rtol=1e-5, atol=0)
    step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / (2**bits - 1)
    assert ((rounded - x).abs() <= 0.501 * step[:, None] + 1e-6).all()
    x[4, 0] = torch.nan
    assert round_activations(x, bits)[4].isnan().all() and round_activations(x, bits)[5:].isfinite().all()
    assert round_activations(x, 16) is x and round_activations(x[:, :0], bits).shape == (9, 0)
    with pytest.raises(ValueError, match="bits"):
        round_activations(x, 5)


def test_invalid_settings_are_rejected():
    for settings in ({"bits": 5}, {"steps": -1}, {"block": 0}, {"assignment": "x"}, {"damping": 0.0}, {"drift": 2.0}):
        with pytest.raises(ValueError):
            ClusterSettings(**settings)
    t, h = np.zeros((1, 2, 4), np.float32), np.zeros((1, 4, 4), np.float32)
    codes, books = np.zeros((1, 2, 4), np.uint8), np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match="sizes"):
        _core.refine_codebooks(t, h[:, :3], codes, books, block=4, steps=1)
    with pytest.raises(ValueError, match="not below"):
        _core.refine_codebooks(t, h, codes + 4, books, block=4, steps=1)
    with pytest.raises(ValueError, match="either"):
        _core.refine_codebooks(t, h, codes, books, block=4, steps=1, factors=h, points=t)


@pytest.mark.parametrize("bits", [4, 8])
def test_rotated_activations_match_the_kernels(bits):
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 30
    width = block_width(192)
    assert width == 64 and block_width(7) == block_width(0) == 1
    torch.testing.assert_close(rotated(rotated(x, width), width), x)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (1, 5, 192)).astype(np.uint8)
    blob = _core.PackedTensor(_core.encode_codebook(
        codes, rng.integers(-127, 128, (1, 5, 1, 16)).astype(np.int16) * 256, np.full((1, 5, 1), 1e-5, np.float32),
        bits=4, block=256, ndim=2, activation_bits=bits, hadamard=width,
    ))  # fmt: skip
    rounding = Rounding(bits, hadamard=True)
    rounded = rounding(x, "model.layers.0.mlp.down_proj")
    expected = rounded @ torch.from_numpy(blob.dequantize())[0].T
    torch.testing.assert_close(torch.from_numpy(blob.matmul(x.numpy())), expected, rtol=1e-4, atol=1e-4)
    plain = rounding(x, "model.layers.0.self_attn.q_proj")
    assert (rounded - x).square().sum() < 0.3 * (plain - x).square().sum()
    assert torch.equal(plain, round_activations(x, bits)) and Rounding()(x, "o_proj") is x
