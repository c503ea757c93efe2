"""The rate setting of ternary experts: decisions, bit estimates, moments, prices, and whole runs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moepack import _core
from moepack.calibration.moments import Tokens, expert_moments, sensitivity
from moepack.cli import app
from moepack.methods import Qmoe
from moepack.methods.qmoe.rate import GAINS, STEPS, RateCurves
from moepack.pipeline import compress
from moepack.solvers.rate import RateGrid, RateProblem, RateSettings, row_bits


def hessians(experts, columns, tokens=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(experts, tokens, columns, generator=generator) @ mixing
    return x.mT @ x / tokens


def weights(experts=3, rows=24, columns=64, seed=0):
    return torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed + 1))


def constant(rows, value):
    return torch.full((rows,), float(value))


@given(st.integers(0, 2**31), st.floats(0, 4))
@settings(max_examples=30, deadline=None)
def test_the_grid_takes_the_cheapest_code(seed, price):
    generator = torch.Generator().manual_seed(seed)
    values, size = torch.randn(2, 50, generator=generator), torch.rand(2, 50, generator=generator) + 0.5
    lengths = torch.rand(2, 50, 3, generator=generator) * 4
    levels, curvature = torch.stack([-size, 1.5 * size], -1), torch.tensor([0.5, 3.0])
    grid = RateGrid(levels, torch.full((2, 50), price), lengths)
    codes, chosen = grid.quantize(values, torch.zeros(2, dtype=torch.long), curvature)
    for e, r in np.ndindex(2, 50):
        candidates = {-1: levels[e, r, 0], 0: 0.0, 1: levels[e, r, 1]}
        costs = {
            code: float((values[e, r] - level) ** 2 * curvature[e] + price * lengths[e, r, code + 1])
            for code, level in candidates.items()
        }
        assert costs[int(codes[e, r])] <= min(costs.values()) + 1e-4
        assert float(chosen[e, r]) == float(candidates[int(codes[e, r])])


@pytest.mark.parametrize("columns, density", [(128, 0.1), (256, 0.2), (256, 0.45), (896, 0.12), (2048, 0.3)])
def test_estimated_bits_match_the_coder(columns, density):
    generator = torch.Generator().manual_seed(columns)
    codes = (torch.rand(4, 256, columns, generator=generator) < density).to(torch.int8)
    codes *= 1 - 2 * torch.randint(2, codes.shape, generator=generator, dtype=torch.int8)
    blob = _core.encode_ternary(codes.numpy(), np.tile(np.float32([-1, 1]), (4, 256, 1)), ndim=3, code="fsv8")
    assert float(row_bits(codes).sum()) == pytest.approx(8 * (blob.nbytes - 256), rel=0.02)


def test_a_higher_price_buys_fewer_bits():
    problem = RateProblem(weights(), hessians(3, 64))
    bits = [float(row_bits(problem.solve(constant(24, p), constant(24, 1.0))[0]).sum()) for p in (0, 0.5, 2, 6, 1e6)]
    assert bits == sorted(bits, reverse=True) and bits[0] > 1.1 * bits[2] and bits[-1] < bits[-2]


def test_a_row_does_not_depend_on_the_rows_beside_it():
    problem = RateProblem(weights(), hessians(3, 64))
    prices = torch.linspace(0.1, 3, 24)
    codes, _, _ = problem.solve(prices, constant(24, 1.2))
    picked = torch.tensor([3, 20, 3, 7])
    some, pairs, _ = problem.rows(picked).solve(prices[picked], constant(4, 1.2))
    # Sums of another batch size may differ in the last bit, which may decide a near-tie.
    assert (some != codes[:, picked]).float().mean() < 0.01
    torch.testing.assert_close(pairs[:, 0], pairs[:, 2])


def test_important_experts_get_the_bits():
    h = hessians(2, 64)
    h[1] *= 100
    codes, _, _ = RateProblem(weights(2), h).solve(constant(24, 4), constant(24, 1.0))
    first, second = row_bits(codes).sum(1).tolist()
    assert second > 1.3 * first


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -1.0])
def test_unusable_hessians_give_finite_results(bad):
    h = hessians(3, 64)
    h[1] = bad
    drift = torch.zeros(3, 64, 64)
    drift[2, 0, 0] = math.nan
    problem = RateProblem(weights(), h, drift)
    codes, levels, reports = problem.solve(constant(24, 0.1), constant(24, 1.0))
    assert torch.isfinite(levels).all() and torch.isfinite(problem.weights).all()
    assert [report.outcome for report in reports] == ["gptq", "rtn", "gptq"]
    assert codes.abs().max() <= 1


def test_levels_compensate_zeroed_weights():
    problem = RateProblem(weights(columns=256), hessians(3, 256), settings=RateSettings(passes=12))
    codes, levels, _ = problem.solve(constant(24, 1), constant(24, 1.0))
    kept = (codes != 0).sum(-1) * levels[..., 1] ** 2
    assert float((kept / problem.weights.square().sum(-1)).median()) == pytest.approx(1, abs=0.1)


def test_the_shift_is_the_regression_of_the_drift():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 500, 32, generator=generator)
    before = x + 0.3 * torch.randn(1, 500, 32, generator=generator) + 0.2 * x.flip(2)
    moments = expert_moments([[Tokens(x[0], before[0], torch.ones(500))]], 32, torch.device("cpu"))
    w = weights(1, 8, 32)
    settings_ = RateSettings(shift=1.0, shift_damping=1e-6)
    moved = RateProblem(w, moments.hessians, moments.drift, settings_).weights
    wanted = torch.linalg.lstsq(x[0].double(), before[0].double() @ w[0].double().T).solution.T
    torch.testing.assert_close(moved[0].double(), wanted, rtol=1e-3, atol=1e-3)


def test_moments_are_the_weighted_sums():
    generator = torch.Generator().manual_seed(6)
    x, before = torch.randn(2, 7, 5, generator=generator)
    a = torch.rand(7, generator=generator)
    moments = expert_moments([[], [Tokens(x[:3], before[:3], a[:3]), Tokens(x[3:], before[3:], a[3:])]], 5, x.device)
    assert not moments.hessians[0].any() and not moments.drift[0].any()
    torch.testing.assert_close(moments.hessians[1], sum(a[t] * torch.outer(x[t], x[t]) for t in range(7)))
    torch.testing.assert_close(moments.drift[1], sum(a[t] * torch.outer(before[t] - x[t], x[t]) for t in range(7)))


def test_sensitivity_is_the_squared_effect_on_the_experts_output():
    generator = torch.Generator().manual_seed(7)
    gate, up = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
    last = torch.randn(3, 6, dtype=torch.float64, generator=generator)

    def output(parts):
        return (torch.nn.functional.silu(parts[0]) * parts[1]) @ last.T

    found = sensitivity([gate, up], lambda parts: torch.nn.functional.silu(parts[0]) * parts[1], last)
    for token in range(4):
        jacobians = torch.autograd.functional.jacobian(lambda g, u: output((g, u)), (gate[token], up[token]))
        wanted = sum(float(j.square().sum()) for j in jacobians) / 2 / 6
        assert float(found[token]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("target", [1.0, 1.3, 1.6])
def test_a_layer_takes_its_budget(target):
    """Two stages in two groups, all but the last solved once."""
    experts, curves = range(4), RateCurves(target, 4)
    shapes = {"up": (40, 96), "down": (48, 80)}
    h = {
        name: hessians(4, columns, seed=9) * torch.tensor([0.1, 1, 3, 10])[:, None, None]
        for name, (_, columns) in shapes.items()
    }
    w = {name: weights(4, rows, columns, seed=4) for name, (rows, columns) in shapes.items()}
    groups = [experts[:3], experts[3:]]

    def problem(name, group):
        part = slice(group.start, group.stop)
        return RateProblem(w[name][part], h[name][part])

    for group in groups:
        for name in shapes:
            curves.add(name, group, problem(name, group))
    budget, gain = curves.budget()
    assert gain in GAINS
    total = 0.0
    for group in groups:
        for name, (rows, _) in shapes.items():
            for _ in range(3):
                price = curves.unit * budget.price(name, group)
                codes, _, _ = problem(name, group).solve(constant(rows, price), constant(rows, gain))
                bits = row_bits(codes).sum(1)
                budget.record_bits(name, group, bits)
                if budget.excess() is None or abs(budget.excess()) < 0.002:
                    break
            total += float(bits.sum())
    size = sum(4 * rows * columns for rows, columns in shapes.values())
    assert budget.excess() == pytest.approx(total / size / target - 1, abs=1e-9)
    assert total / size == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize("spread, target, gain", [(1, 1.2, 1.2), (1000, 1.2, 1.0), (1000, 0.98, 1.2)])
def test_large_levels_where_experts_are_even_or_bits_are_few(spread, target, gain):
    curves = RateCurves(target, 3)
    h = hessians(3, 256) * torch.tensor([1, spread, 1])[:, None, None]
    curves.add("up", range(3), RateProblem(weights(columns=256), h))
    assert curves.budget()[1] == gain


def test_unreachable_budgets_take_the_end_of_the_ladder():
    for target, step in ((50.0, STEPS[0]), (0.01, STEPS[-1])):
        curves = RateCurves(target, 3)
        curves.add("up", range(3), RateProblem(weights(), hessians(3, 64)))
        assert curves.budget()[0].price("up", range(3)) == float(step)


def method(text, **options):
    return Qmoe(calibration=str(text), samples=6, sequence_length=64, group=3, **options)


def test_a_model_takes_the_bits_it_was_given(tiny_checkpoint, text, tmp_path):
    model = tiny_checkpoint("mixtral")
    free = compress(model, tmp_path / "free", method=method(text)).bits_per_weight
    target = round(min(free, 2.0) * 0.97, 3)
    report = compress(model, tmp_path / "whole", method=method(text, bits_per_weight=target))
    assert report.bits_per_weight == pytest.approx(target, rel=0.06)
    again = compress(model, tmp_path / "again", method=method(text, bits_per_weight=target))
    assert (tmp_path / "again" / "moepack.json").read_bytes() == (tmp_path / "whole" / "moepack.json").read_bytes()
    assert again.bits_per_weight == report.bits_per_weight


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2", "switch_transformers"])
def test_every_architecture_has_the_knob(tiny_checkpoint, architecture, text, tmp_path):
    report = compress(tiny_checkpoint(architecture), tmp_path / "out", method=method(text, bits_per_weight=2.0))
    assert report.bits_per_weight < 4


def test_rates_out_of_range_are_refused(mixtral, text, tmp_path):
    with pytest.raises(ValueError, match="bits_per_weight"):
        Qmoe(calibration="x", bits_per_weight=3.0)
    with pytest.raises(ValueError, match="ternary"):
        Qmoe(calibration="x", bits_per_weight=1.0, bits="2")
    arguments = ["compress", str(mixtral), str(tmp_path / "out"), "--method", "qmoe", "--calibration", str(text)]
    result = CliRunner().invoke(app, [*arguments, "--bits-per-weight", "0.1"])
    assert result.exit_code == 2 and "bits_per_weight" in result.output
