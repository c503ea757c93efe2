"""`smallest_within` finds what a bisection finds, with fewer evaluations."""

import math
import random
from collections.abc import Callable

import pytest

from moepack.solvers.search import smallest_within


def bisected(function: Callable[[float], float], limit: float, low: float, high: float, exact: float) -> float:
    while high - low > exact:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > limit else (low, middle)
    return high


@pytest.mark.parametrize(("low", "high", "exact"), [(-6, 10, 0.001), (-40, 8, 0.004), (-0.25, 0.25, 0.001)])
def test_falling_functions_are_solved_as_by_a_bisection_in_half_the_evaluations(
    low: float, high: float, exact: float
) -> None:
    calls = {"search": 0, "bisection": 0}
    for seed in range(200):
        drawn = random.Random(seed)
        weights, bits, spread = 10 ** drawn.uniform(2, 9), drawn.uniform(0.1, 8), drawn.uniform(-3, 3)

        def rate(exponent: float, kind: str, weights: float = weights, spread: float = spread) -> float:
            calls[kind] += 1
            return weights * math.log2(1 + 2 ** (1.3 * (spread + 4 - exponent)))

        found = smallest_within(lambda each: rate(each, "search"), bits * weights, low, high, exact, weights)
        expected = bisected(lambda each: rate(each, "bisection"), bits * weights, low, high, exact)
        assert found == pytest.approx(expected, abs=1e-9)
    assert calls["search"] < 0.6 * calls["bisection"]


@pytest.mark.parametrize(
    "function",
    [
        lambda _: 1.0,
        lambda _: -1.0,
        lambda _: math.nan,
        lambda each: math.inf if each < 0.3 else -1.0,
        lambda each: 1e12 if each < 0.3 else -1e-9,
        lambda each: 1.0 if math.sin(40 * each) > 0 else -1.0,
    ],
    ids=["never", "always", "nan", "infinite", "steep", "not falling"],
)
def test_the_result_ends_a_cell_in_which_the_limit_is_passed(function: Callable[[float], float]) -> None:
    found = smallest_within(function, 0.0, -1.0, 1.0, 0.001, 1.0)
    assert found == 1.0 or not function(found) > 0
    assert found <= -1.0 + 0.001 or function(found - 2 / 2048) > 0
