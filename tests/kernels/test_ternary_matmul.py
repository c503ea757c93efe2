"""Products with encoded tensors against float64, within the bound of a float32 sum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack import CorruptionError, TernaryTensor, encode_ternary
from ternary_cases import CODES, EMPTY, SHAPES, ternary, values


def error_bound(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The error bound of a float32 sum: half an ulp of the sum of magnitudes per term."""
    magnitude = x.double().abs() @ weight.double().abs().transpose(-1, -2)
    return magnitude * (weight.shape[-1] + 2) * 2.0**-24 + 1e-37


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul(shape: tuple[int, ...], code: str, tokens: int, dtype: torch.dtype) -> None:
    codes, levels = ternary(shape)
    weight = values(codes, levels)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*shape[:-2], tokens, shape[-1], generator=generator).to(dtype)
    y = encode_ternary(codes, levels=levels, code=code).matmul(x)
    assert (y.dtype, y.shape) == (dtype, (*shape[:-2], tokens, shape[-2]))
    exact = x.double() @ weight.double().transpose(-1, -2)
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).tiny
    assert ((y.double() - exact).abs() <= error_bound(weight, x) * 1.01 + rounding).all()


def test_matmul_takes_one_token_numpy_and_odd_memory() -> None:
    codes, levels = ternary((20, 48))
    encoded = encode_ternary(codes, levels=levels)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    y = encoded.matmul(x)
    assert encoded.matmul(x[2]).shape == (20,)
    # One token may be summed in another order than several.
    torch.testing.assert_close(encoded.matmul(x[2]), y[2])
    assert encoded.matmul(x.T.contiguous().T).equal(y)
    assert encoded.matmul(x.clone().requires_grad_()).requires_grad
    product = encoded.matmul(x.numpy())
    assert isinstance(product, np.ndarray) and np.array_equal(product, y.numpy())
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    assert np.array_equal(encoded.matmul(frozen), y.numpy())


def test_zero_weights_hide_non_finite_values() -> None:
    encoded = encode_ternary(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    assert encoded.matmul(torch.tensor([float("nan"), 3.0])).tolist() == [6.0, 0.0]


@pytest.mark.parametrize("shape", [(3,), (4, 3), (1, 4, 8), (), (2, 2, 8)])
def test_matmul_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"activations have shape .*expected \['tokens', 8\]"):
        encode_ternary(torch.zeros(5, 8)).matmul(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(8,), (4, 8), (3, 4, 8), (2, 4, 7)])
def test_matmul_of_a_stack_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[2, 'tokens', 8\]"):
        encode_ternary(torch.zeros(2, 5, 8)).matmul(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_matmul_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="activations must be float32, bfloat16 or float16"):
        encode_ternary(torch.zeros(5, 8)).matmul(torch.zeros(1, 8, dtype=dtype))


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("code", CODES)
def test_empty(shape: tuple[int, ...], code: str) -> None:
    x = torch.ones(*shape[:-2], 3, shape[-1])
    product = encode_ternary(torch.zeros(shape), code=code).matmul(x)
    assert product.equal(torch.zeros(*shape[:-2], 3, shape[-2]))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), code=st.sampled_from(CODES))
def test_damaged_blobs_never_abort(data: st.DataObject, code: str) -> None:
    """The product of a damaged blob that is not rejected has the right shape."""
    codes, levels = ternary((2, 9, 70), zeros=data.draw(st.sampled_from([0.3, 0.7, 0.95])))
    blob = np.array(encode_ternary(codes, levels=levels, code=code).data)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = TernaryTensor(blob)
    except CorruptionError:
        return
    x = torch.ones(*damaged.shape[:-2], 2, damaged.shape[-1])
    assert damaged.matmul(x).shape == (*damaged.shape[:-2], 2, damaged.shape[-2])
