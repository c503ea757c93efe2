"""API functions accept torch tensors and NumPy arrays with any memory layout and return the argument's kind.

Each case computes a function from contiguous torch tensors. Any other layout of the same values, in either library,
must give the same values in the library of the argument.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moepack
from moepack.codebook import CodebookTensor
from moepack.groupwise import GroupwiseTensor

Tensors = Sequence[torch.Tensor]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of a tensor twice as wide."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Reverse the memory order of an array's axes without changing its values."""
    order = [*reversed(range(tensor.ndim))]
    return tensor.permute(order).contiguous().permute(order)


def negative(array: np.ndarray) -> np.ndarray:
    """A view with negative strides."""
    return np.flip(np.flip(array).copy())


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def swapped(array: np.ndarray) -> np.ndarray:
    """The other byte order."""
    return array.astype(array.dtype.newbyteorder(">"))


def unaligned(array: np.ndarray) -> np.ndarray:
    """Values that start at an odd address."""
    return np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    "torch, strided": strided,
    "torch, transposed": transposed,
    "torch, with gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    "numpy": lambda tensor: tensor.numpy(),
    "numpy, strided": lambda tensor: strided(tensor).numpy(),
    "numpy, Fortran's order": lambda tensor: np.asfortranarray(tensor.numpy()),
    "numpy, negative strides": lambda tensor: negative(tensor.numpy()),
    "numpy, read-only": lambda tensor: read_only(tensor.numpy()),
    "numpy, unaligned": lambda tensor: unaligned(tensor.numpy()),
    "numpy, other byte order": lambda tensor: swapped(tensor.numpy()),
}


def weights(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 16, 128, generator=generator)


def drawn(high: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Codes below `high`."""
    return lambda generator: torch.randint(high, shape, generator=generator, dtype=torch.uint8)


def numbers(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """Values that float16 holds."""
    return lambda generator: torch.randn(*shape, generator=generator).half().float()


def levels(generator: torch.Generator) -> torch.Tensor:
    """Pairs (negative, positive)."""
    return torch.rand(8, 2, generator=generator).half().float() * torch.tensor([-1.0, 1.0])


def ternary_codes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 2, (8, 40), generator=generator, dtype=torch.int8)


def words(generator: torch.Generator) -> torch.Tensor:
    return torch.from_numpy(np.asarray(moepack.pack_int3(drawn(8, 3, 64)(generator).numpy())))


CASES: dict[str, tuple[Callable[..., Any], tuple[Callable[[torch.Generator], torch.Tensor], ...]]] = {
    "pack_int3": (moepack.pack_int3, (drawn(8, 3, 64),)),
    "unpack_int3": (moepack.unpack_int3, (words,)),
    "quantize_ternary": (moepack.quantize_ternary, (weights,)),
    "encode_coded": (moepack.encode_coded, (ternary_codes, numbers(8))),
    "quantize_groupwise": (lambda w: moepack.quantize_groupwise(w, 3, 32), (weights,)),
    "quantize_groupwise, offsets": (lambda w: moepack.quantize_groupwise(w, 2, symmetric=False), (weights,)),
    "encode_ternary": (lambda codes, pairs: moepack.encode_ternary(codes, levels=pairs), (ternary_codes, levels)),
    "encode_groupwise": (
        lambda codes, scales, offsets: moepack.encode_groupwise(codes, scales, offsets, bits=4, group_size=32),
        (drawn(16, 8, 64), numbers(8, 2), numbers(8, 2)),
    ),
    "encode_codebook": (moepack.encode_codebook, (drawn(8, 8, 40), numbers(8, 8))),
    "lut_matmul": (moepack.lut_matmul, (drawn(16, 8, 64), numbers(8, 16), numbers(3, 64))),
    "GroupwiseTensor.quantize": (GroupwiseTensor.quantize, (weights,)),
    "CodebookTensor.quantize": (
        lambda w, importance: CodebookTensor.quantize(w, 3, importance=importance),
        (weights, lambda generator: torch.rand(2, 128, generator=generator)),
    ),
    "TernaryTensor.matmul": (
        lambda x: moepack.encode_ternary(torch.tensor([[0.5, 0.0, -1.0, 0.5]]).repeat(8, 16)).matmul(x),
        (numbers(5, 64),),
    ),
    "GroupwiseTensor.matmul": (
        lambda x: GroupwiseTensor.quantize(torch.arange(512.0).reshape(8, 64)).matmul(x),
        (numbers(5, 64),),
    ),
    "CodebookTensor.matmul": (
        lambda x: CodebookTensor.quantize(torch.arange(512.0).reshape(8, 64)).matmul(x),
        (numbers(5, 64),),
    ),
}

TAKE_NO_ARRAYS = {
    "compress",
    "compute_mode",
    "describe",
    "evaluate",
    "load",
    "record_reference",
    "set_compute_mode",
    "verify",
}


def test_every_function_of_the_api_has_a_case() -> None:
    functions = {name for name in moepack.__all__ if inspect.isfunction(getattr(moepack, name))}
    assert functions == {name.split(",")[0] for name in CASES if "." not in name} | TAKE_NO_ARRAYS


def parts(result: Any) -> list[Any]:
    """The result of a function: an array, a packed tensor, or several arrays."""
    return [part for part in result if part is not None] if isinstance(result, tuple) else [result]


def same(found: Any, expected: Any, library: type) -> None:
    """Values and dtype are as expected; an array belongs to the library."""
    if not isinstance(expected, torch.Tensor):
        assert found == expected
        return
    assert isinstance(found, library)
    values = np.asarray(found.detach() if isinstance(found, torch.Tensor) else found)
    assert values.dtype == expected.numpy().dtype
    np.testing.assert_array_equal(values, expected.numpy())


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), data=st.data())
def test_any_layout_gives_the_same_in_kind(case: str, seed: int, data: st.DataObject) -> None:
    function, makers = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    arguments = [make(generator) for make in makers]
    layouts = [data.draw(st.sampled_from([*LAYOUTS])) for _ in arguments]
    expected = parts(function(*arguments))
    found = parts(function(*(LAYOUTS[name](value) for name, value in zip(layouts, arguments, strict=True))))
    # Activations come last: the product belongs to their library.
    library = torch.Tensor if layouts[-1].startswith("torch") else np.ndarray
    for one, other in zip(found, expected, strict=True):
        same(one, other, library)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_over_groups_have_one_order(layout: str) -> None:
    """Codes do not depend on strides; with another order of sums, two of these weights would have other codes."""
    weight = weights(torch.Generator().manual_seed(109))
    found = moepack.quantize_groupwise(LAYOUTS[layout](weight), 3, 32)
    expected = moepack.quantize_groupwise(weight, 3, 32)
    np.testing.assert_array_equal(found.codes, expected.codes)


@pytest.mark.parametrize("case", CASES)
def test_a_list_is_refused(case: str) -> None:
    function, makers = CASES[case]
    arguments = [make(torch.Generator().manual_seed(0)).tolist() for make in makers]
    with pytest.raises(TypeError):
        function(*arguments)
