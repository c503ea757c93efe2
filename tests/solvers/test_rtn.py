"""Rounding to the paper's ternary grid against a loop-based definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moepack import InvalidTensorError, quantize_ternary

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def naive(row: list[float]) -> tuple[list[int], tuple[float, float]]:
    low, high = min([*row, 0.0]), max([*row, 0.0])
    return [1 if x > high / 2 else -1 if x < low / 2 else 0 for x in row], (low, high)


@settings(max_examples=60, deadline=None)
@given(
    weight=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=9),
        elements=st.floats(-8, 8, width=16) | st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, -2.0]),
    ),
    dtype=st.sampled_from(FLOATS),
)
def test_agrees_with_the_definition(weight: np.ndarray, dtype: torch.dtype) -> None:
    values = torch.from_numpy(weight).to(dtype)
    codes, levels = quantize_ternary(values)
    assert (codes.dtype, levels.dtype) == (torch.int8, torch.float32)
    assert levels.shape == (*values.shape[:-1], 2)
    for row, row_codes, row_levels in zip(
        values.double().flatten(0, -2), codes.flatten(0, -2), levels.flatten(0, -2), strict=True
    ):
        expected, (low, high) = naive(row.tolist())
        assert row_codes.tolist() == expected
        assert row_levels.tolist() == torch.tensor([low, high], dtype=torch.float64).bfloat16().tolist()


def test_half_way_becomes_zero_and_levels_include_zero() -> None:
    codes, levels = quantize_ternary(torch.tensor([[2.0, 1.0, 1.5, 0.25], [-2.0, -1.0, -1.5, -0.25]]))
    assert codes.tolist() == [[1, 0, 1, 0], [-1, 0, -1, 0]]
    assert levels.tolist() == [[0.0, 2.0], [-2.0, 0.0]]


def test_levels_are_bf16_unless_asked_otherwise() -> None:
    weight = torch.tensor([[1 + 2**-10, -(1 + 2**-20)]])
    assert quantize_ternary(weight)[1].tolist() == [[-1.0, 1.0]]
    assert quantize_ternary(weight, level_dtype=torch.float16)[1].tolist() == [[-1.0, 1 + 2**-10]]
    assert quantize_ternary(weight, level_dtype=torch.float32)[1].tolist() == [[-(1 + 2**-20), 1 + 2**-10]]
    with pytest.raises(ValueError, match="level_dtype"):
        quantize_ternary(weight, level_dtype=torch.float64)


def test_more_rows_than_a_chunk() -> None:
    weight = torch.randn(3, 700, 1000, generator=torch.Generator().manual_seed(0))
    codes, levels = quantize_ternary(weight)
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    assert torch.equal(codes, (weight > high / 2).to(torch.int8) - (weight < low / 2).to(torch.int8))
    assert torch.equal(levels, torch.cat((low, high), -1).bfloat16().float())


def test_numpy_and_odd_memory() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    codes, levels = quantize_ternary(torch.from_numpy(weight))
    frozen = weight.copy()
    frozen.flags.writeable = False
    for other in (weight, frozen, weight.astype(">f4"), np.asfortranarray(weight)):
        other_codes, other_levels = quantize_ternary(other)
        assert isinstance(other_codes, np.ndarray) and isinstance(other_levels, np.ndarray)
        assert np.array_equal(other_codes, codes.numpy()) and np.array_equal(other_levels, levels.numpy())
    strided = torch.from_numpy(weight).requires_grad_().T.contiguous().T
    assert not quantize_ternary(strided)[1].requires_grad
    assert torch.equal(quantize_ternary(strided)[0], codes)
    assert np.array_equal(quantize_ternary(weight[:, ::-1])[0], codes.numpy()[:, ::-1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3), (0, 0, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    codes, levels = quantize_ternary(torch.empty(shape))
    assert codes.shape == shape and levels.shape == (*shape[:-1], 2)
    assert not levels.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_not_finite_is_named(bad: float, dtype: torch.dtype) -> None:
    weight = torch.ones(2, 600, 1000, dtype=dtype)
    weight[1, 599, 7] = bad
    with pytest.raises(InvalidTensorError, match=rf"tensor 'w2': holds {bad} at \[1, 599, 7\]") as caught:
        quantize_ternary(weight, name="w2")
    assert caught.value.tensor == "w2"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4), "shape"),
        (torch.ones(2, 2, dtype=torch.int32), "int32"),
        (torch.ones(2, 2).to_sparse(), "dense"),
        (torch.ones(2, 2, device="meta"), "dense"),
        (torch.full((2, 2), 3.4e38), "out of range"),
        (np.ones((2, 2), complex), "complex"),
    ],
)
def test_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidTensorError, match=message):
        quantize_ternary(weight)


def test_other_types_are_refused() -> None:
    for other in ([[1.0]], None, np.ma.masked_array([[1.0]], [[True]])):
        with pytest.raises(TypeError):
            quantize_ternary(other)
