"""Group-wise integers solved on inputs: equal to a naive reference, and never worse than rounding or GPTQ."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_gptq import problem

from moepack.errors import InvalidTensorError
from moepack.solvers.gptq import GptqSettings, damped, factorize, gptq
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.integers import Groups, IntegerSettings, solve_integers

GRIDS = [
    IntegerSettings(bits, group, symmetric)
    for bits, group in [(2, 16), (3, 32), (4, 64), (8, None)]
    for symmetric in (True, False)
]


def metric_of(hessians, damping=0.5):
    factors = factorize(hessians, damping)
    return damped(hessians, factors.damping, factors.reasons)


def errors(weights, values, metric):
    """Output errors [E, R] in float64."""
    left = (weights - values).double()
    return ((left @ metric.double()) * left).sum(-1)


def naive(weights, hessian, settings):
    """Codes and values [R, C] of one expert: the definition, in float64, one weight at a time."""
    found = quantize_groupwise(weights, settings.bits, settings.group, symmetric=settings.symmetric)
    columns, width = weights.shape[1], settings.group or weights.shape[1]
    middle = 2 ** (settings.bits - 1) if settings.symmetric else 0
    scales = found.scales.double().numpy()
    offsets = np.zeros_like(scales) if found.offsets is None else found.offsets.double().numpy()
    metric = hessian.double().numpy() / float(hessian.diagonal().double().mean())
    metric[np.diag_indices(columns)] += settings.damping
    order = np.argsort(-hessian.diagonal().numpy(), kind="stable")
    inverse = np.linalg.inv(metric[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    codes = np.zeros(weights.shape)
    for row, weight in enumerate(weights.double().numpy()):

        def nearest(value, group, row=row):
            scale = scales[row, group]
            step = np.rint((value - offsets[row, group]) / scale) if scale else 0.0
            return np.clip(step, -middle, 2**settings.bits - 1 - middle)

        def value_of(row=row):
            place = np.arange(columns) // width
            return scales[row, place] * codes[row] + offsets[row, place]

        current = weight[order].copy()
        for at, column in enumerate(order):
            codes[row, column] = nearest(current[at], column // width)
            value = codes[row, column] * scales[row, column // width] + offsets[row, column // width]
            current[at:] -= (current[at] - value) / upper[at, at] * upper[at, at:]
        for sweep in range(settings.sweeps + 1):
            for group in range(scales.shape[1]):
                part = slice(group * width, (group + 1) * width)
                left, own = (weight - value_of()) @ metric, metric[part, part]
                basis = [codes[row, part]] + ([] if settings.symmetric else [np.ones(len(codes[row, part]))])
                normal = np.array([[one @ own @ other for other in basis] for one in basis])
                if np.linalg.cond(normal) > 1e12:
                    continue
                steps = np.linalg.solve(normal, [one @ left[part] for one in basis])
                before, old = (weight - value_of()), (scales[row, group], offsets[row, group])
                scales[row, group] = np.float16(old[0] + steps[0])
                if not settings.symmetric:
                    offsets[row, group] = np.float16(old[1] + steps[1])
                after = weight - value_of()
                if after @ metric @ after >= before @ metric @ before:
                    scales[row, group], offsets[row, group] = old
            for column in range(columns) if sweep < settings.sweeps else ():
                slope = ((weight - value_of()) @ metric)[column] / metric[column, column]
                codes[row, column] = nearest(value_of()[column] + slope, column // width)
    return codes + middle, scales, offsets


@pytest.mark.parametrize("settings", GRIDS, ids=str)
@pytest.mark.parametrize("sweeps", [0, 2])
def test_equals_the_naive_reference(settings, sweeps):
    weights, hessians = problem(experts=2, rows=5, columns=64)
    settings = replace(settings, sweeps=sweeps)
    found = solve_integers(weights, hessians, settings)
    for expert in range(2):
        codes, scales, _ = naive(weights[expert], hessians[expert], settings)
        differing = (found.codes[expert].numpy() != codes).mean()
        # A value within float32 rounding of the middle between two codes may take either.
        assert differing <= (0.02 if settings.bits == 8 else 0.0), differing
        if not differing:
            assert np.allclose(found.grid.scales[expert].numpy(), scales, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("settings", GRIDS, ids=str)
def test_every_step_lowers_the_output_error(settings):
    weights, hessians = problem(columns=192)
    metric = metric_of(hessians)
    rounded = group_values(
        quantize_groupwise(weights, settings.bits, settings.group, symmetric=settings.symmetric),
        settings.bits,
        settings.group,
    )
    grid = Groups.of(weights, settings)
    alone = gptq(weights, hessians, grid, GptqSettings(0.5, act_order=True)).values
    before = errors(weights, alone, metric)
    assert before.sum() < errors(weights, rounded, metric).sum()
    for sweeps in range(3):
        found = solve_integers(weights, hessians, replace(settings, sweeps=sweeps))
        after = errors(weights, found.values, metric)
        assert (after <= before * 1.0001).all()
        assert torch.allclose(found.errors.double(), after.sum(1), rtol=1e-3)
        before = after
    assert torch.equal(found.values, found.grid.values(found.codes.float()))
    assert torch.equal(found.grid.scales, found.grid.scales.half().float())


def test_rows_and_experts_are_independent():
    weights, hessians = problem(experts=3, rows=8, columns=96)
    settings = IntegerSettings(3, 32)
    together = solve_integers(weights, hessians, settings)
    alone = solve_integers(weights[1:2, 4:6], hessians[1:2], settings)
    assert (together.codes[1:2, 4:6] != alone.codes).float().mean() < 0.01
    assert torch.allclose(together.values[1:2, 4:6], alone.values, atol=1e-2)


@pytest.mark.parametrize("factor", [2.0**-6, 2.0**6])
def test_scales_with_the_weights_and_not_with_the_hessian(factor):
    weights, hessians = problem(columns=64)
    settings = IntegerSettings(3, 32)
    plain = solve_integers(weights, hessians, settings)
    assert torch.equal(solve_integers(weights, hessians * factor, settings).codes, plain.codes)
    scaled = solve_integers(weights * factor, hessians, settings)
    assert torch.equal(scaled.codes, plain.codes) and torch.equal(scaled.values, plain.values * factor)


@pytest.mark.parametrize("bad", ["zero", "nan", "inf", "negative"])
def test_an_expert_with_an_unusable_hessian_is_rounded(bad):
    weights, hessians = problem(experts=2, columns=64)
    if bad == "zero":
        hessians[0] = 0
    else:
        hessians[0, 3, 3] = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0}[bad]
    found = solve_integers(weights, hessians, IntegerSettings(3, 64))
    expected = quantize_groupwise(weights, 3, 64)
    assert found.reports[0].reason and not found.reports[1].reason
    squares = (found.values[0] - weights[0]).square().sum()
    assert squares <= (group_values(expected, 3, 64)[0] - weights[0]).square().sum() * 1.0001
    assert torch.isfinite(found.values).all()


def test_constant_and_zero_groups_stay_finite():
    weights, hessians = problem(experts=1, columns=64)
    weights[:, 0], weights[:, 1, :32], weights[:, 2] = 0.0, 0.0, 0.25
    for symmetric in (True, False):
        found = solve_integers(weights, hessians, IntegerSettings(2, 32, symmetric))
        assert torch.isfinite(found.values).all() and not found.values[0, 0].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_unusable_weights_are_refused(value):
    weights, hessians = problem(experts=1, columns=64)
    weights[0, 0, 0] = value
    with pytest.raises(InvalidTensorError):
        solve_integers(weights, hessians, IntegerSettings(4, 64))


def test_empty_matrices():
    for shape in [(2, 0, 16), (2, 3, 0), (0, 3, 16)]:
        hessians = torch.zeros(shape[0], shape[2], shape[2])
        assert solve_integers(torch.zeros(shape), hessians, IntegerSettings(4, 64)).codes.shape == shape
