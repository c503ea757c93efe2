"""Round-to-nearest, HQQ and least squares on groups, against loop-based oracles and their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moepack.errors import InvalidTensorError
from moepack.solvers.affine import GroupSpec, quantize_affine, quantize_residual, round_to_nearest
from moepack.solvers.hqq import HalfQuadratic
from moepack.solvers.least_squares import LeastSquares
from oracle import groups as oracle

SOLVERS = {"rtn": round_to_nearest, "hqq": HalfQuadratic(), "lsq": LeastSquares()}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative(weight, result):
    return float((result.values() - weight).norm() / weight.norm())


@pytest.mark.parametrize(("solver", "expected"), [("rtn", 0.1923), ("hqq", 0.1855), ("lsq", 0.1646)])
def test_errors_on_gaussian_weights_at_three_bits(solver, expected):
    weight = gaussian(512, 1024)
    assert relative(weight, quantize_affine(weight, GroupSpec(3, 64), SOLVERS[solver])) == pytest.approx(expected, 0.01)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_least_squares_is_never_worse_than_the_others(bits, symmetric):
    weight = gaussian(64, 256)
    weight[:8] = weight[:8].abs() + 0.1
    errors = {}
    for name, solver in SOLVERS.items():
        result = quantize_affine(weight, GroupSpec(bits, 64, symmetric), solver)
        errors[name] = (result.values() - weight).square().unflatten(1, (4, 64)).sum(2)
    assert (errors["lsq"] <= errors["rtn"] * 1.0001 + 1e-12).float().mean() > 0.99
    assert errors["lsq"].sum() < errors["hqq"].sum() and errors["lsq"].sum() < errors["rtn"].sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hqq_equals_the_plain_oracle(bits):
    weight = gaussian(40, 48, seed=bits)
    found = quantize_affine(weight, GroupSpec(bits, 48), HalfQuadratic()).values().double().numpy()
    agreed, ratios = 0, []
    for row, values in zip(weight.double().numpy(), found, strict=True):
        expected = oracle.hqq(row, bits)
        # Parameters are stored in float16 here; a row whose weights come near a tie may round differently.
        norms = [(np.abs(row - v) ** 0.7).sum() for v in (values, expected)]
        ratios.append(norms[0] / norms[1])
        agreed += np.allclose(values, expected, atol=np.abs(row).max() * 2e-3)
    assert agreed >= 0.6 * len(found) and np.mean(ratios) == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("bits", [1, 2])
def test_least_squares_comes_close_to_the_best_of_all(bits):
    ratios = []
    for row in gaussian(60, 9, seed=3):
        result = quantize_affine(row[None], GroupSpec(bits, 9), LeastSquares())
        error = float((result.values()[0] - row).double().square().sum())
        ratios.append(error / oracle.best_of_all(row.double().numpy(), bits))
    assert min(ratios) > 0.99
    assert np.mean(ratios) < 1.12


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_codes_are_the_nearest_for_the_stored_parameters(solver, symmetric):
    weight = gaussian(32, 100)
    spec = GroupSpec(3, 32, symmetric)
    result = quantize_affine(weight, spec, SOLVERS[solver])
    assert torch.equal(result.scales, result.scales.half().float())
    values = result.values()
    group = torch.arange(100) // 32
    for code in range(8):
        other = torch.full_like(result.codes, code)
        offered = type(result)(spec, other, result.scales, result.offsets).values()
        step = result.scales.abs()[:, group]
        assert ((values - weight).abs() <= (offered - weight).abs() + 1e-4 * step).all()


def test_parameters_of_the_last_iterate_solve_the_regression():
    weight = gaussian(50, 64)
    result = quantize_affine(weight, GroupSpec(3, 64), LeastSquares(iterations=50))
    gains = []
    for row, codes, values in zip(weight.double(), result.codes.double(), result.values().double(), strict=True):
        scale, offset = oracle.regression(row.numpy(), codes.numpy())
        refit = ((row - scale * codes - offset) ** 2).sum()
        gains.append(float(refit / ((row - values) ** 2).sum()))
    assert min(gains) > 0.995


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_on_a_grid_are_kept(solver, symmetric):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 8, (16, 64), generator=generator)
    codes[:, 0], codes[:, 1] = 0, 7
    weight = (codes - 4) * 0.25 if symmetric else codes * 0.25 - 0.5
    result = quantize_affine(weight, GroupSpec(3, 64, symmetric), SOLVERS[solver])
    assert torch.equal(result.values(), weight)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_degenerate_groups(solver, symmetric):
    def quantize(rows):
        return quantize_affine(torch.tensor(rows), GroupSpec(3, 8, symmetric), SOLVERS[solver]).values()

    assert not quantize([[0.0] * 8]).any()
    constant = quantize([[-0.75] * 8, [3.0] * 8])
    assert torch.allclose(constant, torch.tensor([[-0.75] * 8, [3.0] * 8]), rtol=1e-3)
    negative = torch.linspace(-2, -1, 8)
    assert (quantize([negative.tolist()]) - negative).norm() < (0.3 if symmetric else 0.05) * negative.norm()
    single = quantize([[0.0] * 7 + [5.0]])
    assert single.isfinite().all() and abs(single[0, 7] - 5) < 0.02


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5), (2, 5, 1), (3, 7, 65)])
def test_shapes(shape):
    result = quantize_affine(gaussian(*shape), GroupSpec(3, 32), LeastSquares())
    assert result.codes.shape == shape and result.codes.dtype == torch.uint8
    assert result.scales.shape == (*shape[:-1], -(-shape[-1] // 32)) == result.offsets.shape
    assert result.values().shape == shape


@settings(max_examples=40, deadline=None)
@given(
    weight=hnp.arrays(np.float32, (3, 11), elements=st.floats(-100, 100, width=16)),
    bits=st.integers(1, 8),
    symmetric=st.booleans(),
    solver=st.sampled_from(sorted(SOLVERS)),
)
def test_any_values_give_finite_codes_and_do_not_depend_on_their_neighbours(weight, bits, symmetric, solver):
    spec = GroupSpec(bits, 4, symmetric)
    whole = quantize_affine(torch.from_numpy(weight), spec, SOLVERS[solver])
    assert whole.values().isfinite().all() and int(whole.codes.max()) <= spec.top
    alone = quantize_affine(torch.from_numpy(weight[1:2]), spec, SOLVERS[solver])
    assert torch.equal(alone.values()[0], whole.values()[1])


def test_starting_from_parameters_is_never_worse():
    weight = gaussian(32, 128)
    spec = GroupSpec(3, 64)
    first = quantize_affine(weight, spec, LeastSquares())
    moved = weight + gaussian(32, 128, seed=9) * 0.1
    again = quantize_affine(moved, spec, LeastSquares(), start=first)
    fixed = quantize_affine(moved, spec, LeastSquares(refinements=0), start=first)
    assert torch.equal(fixed.scales, first.scales)
    assert relative(moved, again) < relative(moved, fixed)
    assert relative(moved, again) < 1.03 * relative(moved, quantize_affine(moved, spec, LeastSquares()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_unstorable_values_are_named(bad):
    weight = torch.ones(2, 3, 40)
    weight[1, 2, 37] = bad
    with pytest.raises(InvalidTensorError, match=r"'w'.*\[1, 2, 37\]"):
        quantize_affine(weight, GroupSpec(3, 32), LeastSquares(), name="w")


@pytest.mark.parametrize("settings", [{"bits": 0}, {"bits": 9}, {"group_size": 0}, {"storage": torch.float32}])
def test_impossible_grids(settings):
    with pytest.raises(ValueError):
        GroupSpec(**{"bits": 3, "group_size": 64, **settings})


@pytest.mark.parametrize(("bits", "symmetric", "columns"), [(2, True, 150), (3, False, 128), (4, False, 40)])
def test_the_core_fits_as_well_as_torch(bits, symmetric, columns):
    weight, spec, solver = gaussian(50, columns), GroupSpec(bits, 64, symmetric), LeastSquares()
    native = quantize_affine(weight, spec, solver)
    reference = quantize_affine(weight, spec, lambda x, grid, start: solver(x, grid, start))
    assert relative(weight, native) == pytest.approx(relative(weight, reference), 2e-3)
    same = (native.codes == reference.codes).float().mean()
    assert same > 0.98
    warm = quantize_affine(weight, spec, solver, start=reference)
    assert relative(weight, warm) <= relative(weight, reference) * (1 + 1e-6)


@pytest.mark.parametrize("native", [True, False])
def test_the_residual_of_a_compensator_is_quantized_in_place(native):
    weight, spec = gaussian(2 * 24, 70).view(2, 24, 70), GroupSpec(3, 32)
    solver = LeastSquares() if native else lambda x, grid, start: LeastSquares()(x, grid, start)
    compensation = gaussian(48, 70, seed=1).view(2, 24, 70) * 0.2
    target, rest = weight - compensation, compensation.clone()
    codes, squares = quantize_residual(weight, rest, spec, solver)
    alone = quantize_affine(target, spec, solver)
    assert torch.equal(codes.codes, alone.codes)
    assert torch.allclose(rest, weight - alone.values(), atol=1e-7)
    assert torch.allclose(squares, rest.double().square().sum((1, 2)), rtol=1e-5)
