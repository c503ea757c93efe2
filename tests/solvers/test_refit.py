"""GPTQ on group-wise grids: the search for a group's parameters, and their refit to chosen codes."""

import pytest
import torch
from test_gptq import problem, quadratic

from moepack.solvers.drift import corrected
from moepack.solvers.gptq import gptq
from moepack.solvers.grids import NARROWINGS, AffineGrid
from moepack.solvers.refit import refit_groups


def solved(weights, hessians, group=32, storage=torch.float16):
    grid = AffineGrid(2, group, search=True, storage=storage)
    return grid, gptq(weights, hessians, grid)


@pytest.mark.parametrize("columns, group", [(96, 32), (80, 32), (64, 64)])
def test_a_refit_lowers_the_output_error_and_keeps_the_codes(columns, group):
    weights, hessians = problem(columns=columns)
    grid, result = solved(weights, hessians, group)
    codes = result.codes.clone()
    values = refit_groups(weights, codes, hessians, grid, 0.01)
    assert torch.equal(codes, result.codes) and torch.equal(values, grid.values(codes))
    assert torch.equal(grid.scales, grid.scales.half().float())
    before, after = quadratic(weights, result.values, hessians), quadratic(weights, values, hessians)
    assert (after < 0.98 * before).all(), (before, after)


def test_one_group_is_the_least_squares_solution():
    weights, hessians = problem(experts=1, rows=6, columns=32)
    grid, result = solved(weights, hessians, storage=torch.float32)
    refit_groups(weights, result.codes, hessians, grid, 1e-9)
    root = torch.linalg.cholesky(hessians[0].double()).T
    for row in range(6):
        basis = torch.stack([result.codes[0, row].double(), torch.ones(32, dtype=torch.float64)], 1)
        expected = torch.linalg.lstsq(root @ basis, root @ weights[0, row].double()[:, None]).solution[:, 0]
        assert float(grid.scales[0, row, 0]) == pytest.approx(float(expected[0]), rel=1e-3, abs=1e-4)
        assert float(grid.offsets[0, row, 0]) == pytest.approx(float(expected[1]), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("bad", ["zero", "nan", "constant codes"])
def test_singular_groups_are_not_refitted(bad):
    weights, hessians = problem(experts=2, columns=64)
    grid, result = solved(weights, hessians)
    codes, before = result.codes, (grid.scales.clone(), grid.offsets.clone())
    if bad == "constant codes":
        codes = torch.full_like(codes, 2)
    else:
        hessians[0] = {"zero": 0.0, "nan": float("nan")}[bad]
    values = refit_groups(weights, codes, hessians, grid, 0.01)
    assert torch.isfinite(values).all()
    assert torch.equal(grid.scales[0], before[0][0]) and torch.equal(grid.offsets[0], before[1][0])
    assert torch.equal(grid.scales[1], before[0][1]) == (bad == "constant codes")


def test_a_searched_group_is_no_worse_than_any_narrowing():
    weights, _ = problem(columns=64)
    grid = AffineGrid(2, 64, search=True)
    grid.fit(weights)
    error = (grid.values(_codes(grid, weights)) - weights).square().sum(-1)
    for share in NARROWINGS:
        low, high = torch.aminmax(weights, dim=-1)
        other = AffineGrid(2, 64)
        other.fit(weights)
        scale, offset = other._narrowed(low, high, share)
        other.scales, other.offsets = scale[..., None], offset[..., None]
        assert (error <= (other.values(_codes(other, weights)) - weights).square().sum(-1) * 1.0001).all()


def _codes(grid, weights):
    return ((weights - grid.offsets) / grid.scales).round().clamp(0, 3)


def test_experts_without_a_usable_hessian_keep_their_weights():
    weights, hessians = problem(columns=48)
    hessians[1] = 0
    drift = 0.1 * hessians.clone()
    drift[2] = float("inf")
    moved = corrected(weights, hessians, drift, 1.0, 1e-6)
    assert torch.equal(moved[1:], weights[1:])
    torch.testing.assert_close(moved[0], 1.1 * weights[0], rtol=1e-3, atol=1e-3)
