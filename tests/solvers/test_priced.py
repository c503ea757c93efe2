"""Rounding with code-length cost: its definition, and less error at equal rate."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moepack.solvers.priced import (
    BLOCK_ROWS,
    CLASSES,
    LARGEST,
    NARROWEST,
    PRICE,
    Lengths,
    Profile,
    round_priced,
)


def lengths(seed: int) -> Lengths:
    generator = torch.Generator().manual_seed(seed)
    return Lengths(torch.rand(CLASSES, 2 * LARGEST + 1, generator=generator) * 12)


def classes_of(values: torch.Tensor) -> torch.Tensor:
    """The classes [blocks] int64 of the row blocks of a matrix [R, C], by their root mean squares."""
    squares = torch.stack([block.double().square().mean() for block in values.split(BLOCK_ROWS)])
    octaves = 0.5 * torch.log2(squares)
    return (4 * (octaves - NARROWEST)).round().nan_to_num(0, CLASSES - 1, 0).clamp(0, CLASSES - 1).long()


@settings(max_examples=40, deadline=None)
@given(
    values=hnp.arrays(
        np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.floats(-30, 30, width=32)
    ),
    seed=st.integers(0, 9),
    price=st.sampled_from([0.0, PRICE, 3.0]),
)  # fmt: skip
def test_no_symbol_is_cheaper(values: np.ndarray, seed: int, price: float) -> None:
    table, given_values = lengths(seed), torch.from_numpy(values)
    found = round_priced(given_values, 1.0, table, price)
    alphabet = torch.arange(-LARGEST, LARGEST + 1)
    for start in range(0, len(values), BLOCK_ROWS):
        block = given_values[start : start + BLOCK_ROWS].double()
        bits = table.bits[int(classes_of(block.float())[0])].double()
        costs = (block[..., None] - alphabet).square() + price * bits
        chosen = costs.gather(-1, (found[start : start + BLOCK_ROWS] + LARGEST).long()[..., None])[..., 0]
        assert bool((chosen <= costs.amin(-1) + 1e-4 * (1 + block.square())).all())


def test_without_a_price_rounds_to_nearest() -> None:
    values = torch.randn(70, 33, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(round_priced(values, 0.5, lengths(0), 0.0).int(), (values / 0.5).round().int())


def test_large_values_go_to_the_nearest_integer() -> None:
    values = torch.tensor([[1e6, -40.4, 31.2, 0.1]])
    assert round_priced(values, 1.0, learned(values, 1.0))[0, :2].tolist() == [1_000_000, -40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype_is_rounded_as_its_values_are(dtype: torch.dtype) -> None:
    values = torch.randn(40, 33, generator=torch.Generator().manual_seed(4)).mul(3).to(dtype)
    assert torch.equal(round_priced(values, 0.7, lengths(1)), round_priced(values.float(), 0.7, lengths(1)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_are_rejected(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite weights in rows 16 to 32"):
        round_priced(torch.tensor([[0.0]] * 20 + [[value]]), 1.0, lengths(0))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (17, 3)])
def test_any_shape(shape: tuple[int, int]) -> None:
    values = torch.ones(shape)
    assert round_priced(values, 0.3, learned(values, 0.3)).shape == shape


def test_zeros_stay_zeros() -> None:
    values = torch.zeros(20, 30)
    assert not round_priced(values, 1.0, learned(values, 1.0)).any()


@pytest.mark.parametrize(("step", "gain"), [(0.8, 0.2), (1.4, 0.6), (2.0, 1.2)])
def test_loses_less_than_rounding_to_nearest_at_the_same_entropy(step: float, gain: float) -> None:
    """Gaussian rows: decibels over Shannon's bound, 1.53 for a priced uniform quantizer at high rates."""
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    priced = round_priced(values[256:], step, learned(values[:256], step))
    nearest = (values[256:] / step).round()
    over = [
        10 * math.log10(float((values[256:] - q * step).square().mean())) + 6.02 * entropy(q) for q in (priced, nearest)
    ]
    assert over[0] < 1.6
    assert over[1] - over[0] > gain


@pytest.mark.parametrize("step", [0.5, 1.5])
def test_a_profile_knows_the_bits(step: float) -> None:
    """Rows of very different widths: the bits that a profile expects are those of the codes, class by class."""
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(3))
    values *= 2.0 ** torch.arange(32).repeat_interleave(16)[:, None].float().div(8).sub(2)
    profile = Profile()
    profile.add(values, 3.0)
    table = profile.lengths(step)
    symbols = round_priced(values, step, table)
    classes = classes_of(values).repeat_interleave(BLOCK_ROWS)
    bits = sum(
        float(table.bits[number][(symbols[row] + LARGEST).long()].sum()) for row, number in enumerate(classes.tolist())
    )
    assert profile.bits(step, table) == pytest.approx(3 * bits, rel=0.002)
    assert profile.mean_square == pytest.approx(float(values.square().mean()), rel=0.002)


def learned(values: torch.Tensor, step: float) -> Lengths:
    profile = Profile()
    profile.add(values, 1.0)
    return profile.lengths(step)


def entropy(symbols: torch.Tensor) -> float:
    counts = torch.unique(symbols, return_counts=True)[1].double()
    return -float((counts / counts.sum() * torch.log2(counts / counts.sum())).sum())
