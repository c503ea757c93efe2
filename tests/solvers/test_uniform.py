"""GPTQ with one step and a price of bits: less error at equal rate, and bad input."""

import math

import numpy as np
import pytest
import torch

from moepack import _core
from moepack.solvers.priced import PRICE, symbols_of
from moepack.solvers.uniform import CodeLengths, UniformProblem, UniformSettings, sampled_lengths, step_of

E, R, C = 2, 64, 96


def weights() -> torch.Tensor:
    return torch.randn(E, R, C, generator=torch.Generator().manual_seed(1))


def hessians() -> torch.Tensor:
    """Hessians of correlated inputs, one per expert."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(E, 400, C, generator=generator) @ torch.randn(C, C, generator=generator) / C**0.5
    return x.transpose(1, 2) @ x


def runs() -> torch.Tensor:
    return torch.arange(E)[:, None].expand(E, R)


def solved(problem: UniformProblem, step: float, price: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Codes, values and bits of two passes."""
    lengths = sampled_lengths(problem.weights / step, (price / (step**2 * problem.curvature)).float())
    for _ in range(2):
        result = problem.solve(step, price, lengths)
        lengths = CodeLengths.counted(result.codes, runs())
    return result.codes, result.values, float(lengths.totals.sum())


def output_error(values: torch.Tensor) -> float:
    lost = weights() - values
    return float((torch.bmm(lost, hessians()) * lost).sum())


@pytest.mark.parametrize("step", [0.5, 1.5])
def test_compensation_loses_less_at_equal_bits(step: float) -> None:
    """Compares with the same rounding under an identity Hessian, at a step of equal bits."""
    seen, blind = (UniformProblem(weights(), h) for h in (hessians(), torch.eye(C).expand(E, C, C).contiguous()))
    _, values, bits = solved(seen, step, PRICE * step**2 * float(seen.curvature.mean()))
    low, high = step / 2, step * 2
    for _ in range(12):
        middle = (low + high) / 2
        _, other, its_bits = solved(blind, middle, PRICE * middle**2 * float(blind.curvature.mean()))
        low, high = (middle, high) if its_bits > bits else (low, middle)
    assert output_error(values) < 0.8 * output_error(other)


def test_codes_are_the_cheapest_of_their_neighbours() -> None:
    problem = UniformProblem(weights(), torch.eye(C).expand(E, C, C).contiguous(), settings=UniformSettings(1e-6))
    step, price = 0.7, 0.1 * 0.7**2
    lengths = sampled_lengths(weights() / step, torch.full((E,), 0.1))
    codes = problem.solve(step, price, lengths).codes.float()
    exact = weights() / step
    nearest = exact.round()
    costs = [
        (exact - q).square() + 0.1 * lengths.of(q) for q in (codes, nearest, nearest - nearest.sign(), nearest * 0)
    ]
    assert all(bool((costs[0] <= other + 1e-5).all()) for other in costs[1:])


def test_a_higher_price_takes_fewer_bits() -> None:
    problem = UniformProblem(weights(), hessians())
    bits = [solved(problem, 0.6, price * float(problem.curvature.mean()))[2] for price in (0.0, 0.02, 0.1, 1.0)]
    assert bits == sorted(bits, reverse=True) and bits[0] > 1.2 * bits[-1]


def test_experts_that_count_more_get_more_bits() -> None:
    scaled = hessians()
    scaled[1] *= 100
    problem = UniformProblem(weights(), scaled)
    codes, _, _ = solved(problem, 1.0, PRICE * float(problem.curvature.mean()))
    assert int((codes[1] != 0).sum()) > 1.5 * int((codes[0] != 0).sum())


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_unusable_hessians_are_survived(value: float) -> None:
    """No token reached the first expert, or its sums overflowed."""
    broken = hessians()
    broken[0] = value
    problem = UniformProblem(weights(), broken, torch.zeros(E, C, C))
    result = problem.solve(
        0.5, PRICE * 0.25 * float(problem.curvature.mean()), CodeLengths.counted(weights().int(), runs())
    )
    assert result.reports[0].reason is not None and result.reports[1].reason is None
    assert bool(torch.isfinite(result.values).all())


def test_constant_rows_zeros_and_outliers() -> None:
    odd = torch.zeros(E, R, C)
    odd[0, :8] = 0.25
    odd[0, 8, 5] = 1e6
    problem = UniformProblem(odd, hessians())
    lengths = sampled_lengths(odd, torch.full((E,), PRICE))
    result = problem.solve(0.25, 1e-6 * float(problem.curvature.mean()), lengths)
    assert int(result.codes[0, 8, 5]) == 4_000_000
    assert not bool(result.codes[1].any()) and bool((result.codes[0, :8] == 1).all())


def test_lengths_match_the_frequencies() -> None:
    codes = torch.cat([torch.zeros(1, 2, 3000), torch.ones(1, 2, 1000)], 2).int()
    lengths = CodeLengths.counted(codes, torch.tensor([[0, 1]]))
    assert lengths.of(torch.tensor([[0.0, 1.0]]))[0].tolist() == pytest.approx([math.log2(4 / 3), 2], rel=0.01)
    assert lengths.totals.tolist() == pytest.approx([4000 * 0.8113] * 2, rel=0.01)


@pytest.mark.parametrize(("price", "curvature"), [(1.0, 2.0), (1e-12, 1e6), (0.0, 1.0)])
def test_a_bit_is_worth_the_price(price: float, curvature: float) -> None:
    step = step_of(price, curvature, PRICE)
    assert step > 0 and step == float(torch.tensor(step).bfloat16())
    assert PRICE * step**2 * curvature == pytest.approx(price, rel=0.01, abs=1e-37)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_the_core_counts_symbols_by_run(dtype: torch.dtype, dependent: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = 100 if dtype == torch.int8 else 20_000
    codes = torch.randint(-wide, wide, (3, 21, 50), generator=generator).to(dtype)
    if dependent:
        codes = torch.where(codes % 2 == 0, codes + 1, codes)
    runs = torch.randint(4, (3, 21), generator=generator)
    found = _core.count_symbols(codes.numpy(), runs.numpy(), number=5, largest=7, dependent=dependent)
    places = symbols_of(codes, dependent).clamp(-8, 8).long() + 8
    expected = torch.bincount((places + 17 * runs[..., None]).flatten(), minlength=5 * 17).view(5, 17)
    assert torch.equal(torch.from_numpy(found), expected.double())


@pytest.mark.parametrize(("runs", "match"), [([[0, 2]], "no run 2"), ([[-1, 0]], "no run -1"), ([[0]], "rows")])
def test_runs_that_do_not_exist_are_refused(runs: list[list[int]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _core.count_symbols(np.zeros((1, 2, 3), np.int8), np.array(runs), number=2, largest=7)
