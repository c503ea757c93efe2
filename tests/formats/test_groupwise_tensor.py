"""Group-wise quantization and its tensor class: against a naive reference, and with unusual input."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import moepack
from moepack import CorruptionError, GroupwiseTensor, InvalidTensorError, encode_groupwise, quantize_groupwise
from moepack.solvers.groupwise import BITS, GROUP_SIZES, _best_scale, _searched, group_values

SIZES = (*GROUP_SIZES, None)


def naive_rtn(weight: np.ndarray, bits: int, size: int | None) -> np.ndarray:
    """The paper's absolute-maximum grid, rounded group by group."""
    values = np.empty_like(weight)
    half, width = 2 ** (bits - 1), size or weight.shape[1]
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], width):
            group = weight[row, start : start + width]
            scale = np.float32(np.float16(np.abs(group).max() * np.float32(2 / (2**bits - 1))))
            codes = np.clip(np.rint(group / scale), -half, half - 1) if scale else np.zeros_like(group)
            values[row, start : start + width] = scale * codes
    return values


def best_by_search(group: np.ndarray, bits: int) -> float:
    """The least squared error of a group over a fine ladder of scales of both signs."""
    half, errors = 2 ** (bits - 1), []
    for step in np.linspace(0.4, 2.0, 400):
        for sign in (-1, 1):
            scale = sign * np.abs(group).max() / (half * step)
            codes = np.clip(np.rint(group / scale), -half, half - 1)
            errors.append(np.square(codes * scale - group).sum())
    return min(errors)


def relative_error(weight: torch.Tensor, bits: int, size: int | None, **options: object) -> float:
    values = group_values(quantize_groupwise(weight, bits, size, **options), bits, size)  # type: ignore[arg-type]
    return float((values - weight).norm() / weight.norm())


@pytest.mark.parametrize("size", [16, 60, 240])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_core_searches_like_torch(bits: int, size: int) -> None:
    """The scales of the core and of torch agree; of two equally good ones, either may win."""
    weight = torch.randn(50, 240, generator=torch.Generator().manual_seed(bits)) * 0.02
    weight[7] = 0
    groups = weight.view(50, -1, size)
    largest = groups.abs().amax(-1)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    found, expected = _searched(groups, bits), unit * _best_scale(groups / unit[..., None], bits)
    assert not found[7].any()
    assert torch.isclose(found, expected, rtol=1e-5).float().mean() > 0.97

    def error(scales: torch.Tensor) -> float:
        half, steps = 2 ** (bits - 1), torch.where(scales == 0, 1.0, scales)[..., None]
        codes = (groups / steps).round().clamp(-half, half - 1)
        return float((codes * steps - groups).double().square().sum())

    assert error(found) == pytest.approx(error(expected), rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_without_search_it_is_the_papers_grid_rounded(bits: int, size: int | None) -> None:
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(bits))
    found = quantize_groupwise(weight, bits, size, search=False)
    assert np.allclose(group_values(found, bits, size), naive_rtn(weight.numpy(), bits, size), atol=1e-7)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_a_packed_tensor_decodes_to_the_quantized_values(bits: int, size: int | None, symmetric: bool) -> None:
    """300 columns: no group size divides them."""
    weight = torch.randn(2, 19, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    found = quantize_groupwise(weight, bits, size, symmetric=symmetric)
    tensor = encode_groupwise(*found, bits=bits, group_size=size)
    assert tensor == GroupwiseTensor.quantize(weight, bits, size, symmetric=symmetric)
    assert (tensor.shape, tensor.bits, tensor.group_size) == ((2, 19, 300), bits, size or 300)
    assert tensor.symmetric == symmetric and (tensor.offsets is None) == symmetric
    assert torch.equal(tensor.decode(), found.codes) and torch.equal(tensor.scales, found.scales)
    values = tensor.dequantize()
    assert torch.allclose(values, group_values(found, bits, size), atol=1e-7)
    x = torch.randn(2, 3, 300)
    assert torch.allclose(tensor.matmul(x), x @ values.mT, atol=1e-4)
    tensor.verify()


@pytest.mark.parametrize("bits", BITS)
def test_searched_scales_are_near_the_best_there_are(bits: int) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    weight[:4] = weight[:4].abs()  # one sign: the grid's outermost code must be on their side
    weight[4] = -weight[4].abs()
    values = group_values(quantize_groupwise(weight, bits, 64), bits, 64)
    for row, found in zip(weight.numpy(), values.numpy(), strict=True):
        # At eight bits, 800 scales differ by chance: each rounds every weight differently.
        assert np.square(found - row).sum() <= (1.2 if bits == 8 else 1.06) * best_by_search(row, bits)


def test_search_helps_and_smaller_groups_help() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    for bits in BITS:
        for symmetric in (True, False):
            errors = [relative_error(weight, bits, size, symmetric=symmetric) for size in SIZES]
            assert errors == sorted(errors)
            assert errors[2] < relative_error(weight, bits, 64, symmetric=symmetric, search=False)
    assert relative_error(weight, 4, 64) < 0.092  # truncation gives 0.194, the paper's scale with rounding 0.103
    assert relative_error(weight, 3, 64) < 0.18


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_zeros_constants_and_one_sign(bits: int, symmetric: bool) -> None:
    weight = torch.zeros(4, 128)
    weight[1] = 0.75
    weight[2] = -0.5
    weight[3, ::2] = 1.0
    weight[3, 64:] = 0
    tensor = GroupwiseTensor.quantize(weight, bits, 64, symmetric=symmetric)
    values = tensor.dequantize()
    assert torch.equal(values[0], weight[0]) and torch.equal(values[3, 64:], weight[3, 64:])
    assert torch.allclose(values, weight, rtol=1e-3)


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64), (3, 4, 0), (0, 0, 0), (0, 5), (5, 0), (1, 1), (1, 33)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_shapes_with_nothing_in_them(shape: tuple[int, ...], symmetric: bool) -> None:
    tensor = GroupwiseTensor.quantize(torch.ones(shape), 4, 32, symmetric=symmetric)
    assert tensor.shape == shape and tensor.dequantize().shape == shape
    assert torch.allclose(tensor.dequantize(), torch.ones(shape), rtol=1e-3)
    tokens = torch.ones(*shape[:-2], 2, shape[-1])
    assert tensor.matmul(tokens).shape == (*shape[:-2], 2, shape[-2])
    tensor.verify()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_non_finite_values_are_named_with_their_place(value: float, symmetric: bool) -> None:
    weight = torch.ones(2, 3, 40)
    weight[1, 2, 39] = value
    with pytest.raises(InvalidTensorError, match=r"'w'.*holds (nan|inf|-inf) at \[1, 2, 39\]"):
        quantize_groupwise(weight, symmetric=symmetric, name="w")


def test_a_scale_that_the_stored_type_cannot_hold_is_an_error() -> None:
    with pytest.raises(InvalidTensorError, match="scale of group"):
        quantize_groupwise(torch.full((1, 16), 1e30), 4, 16)
    values = GroupwiseTensor.quantize(torch.full((1, 16), 1e30), 4, 16, dtype=torch.bfloat16).dequantize()
    assert torch.allclose(values, torch.full((1, 16), 1e30), rtol=1e-2)
    with pytest.raises(InvalidTensorError, match="holds inf"):
        quantize_groupwise(torch.full((1, 16), 1e300, dtype=torch.float64))


def test_the_largest_and_the_smallest_floats() -> None:
    """No overflow or division by zero occurs."""
    for value in (2.0**126, torch.finfo(torch.float32).tiny, 1e-45):
        for symmetric in (True, False):
            weight = torch.tensor([[value, -value, 0.0, value / 2]]).repeat(1, 8)
            found = quantize_groupwise(weight, 8, 32, symmetric=symmetric, dtype=torch.bfloat16)
            assert bool(group_values(found, 8, 32).isfinite().all())
            if value > 1e-44:
                assert torch.allclose(group_values(found, 8, 32), weight, rtol=0.02, atol=0.02 * value)


@pytest.mark.parametrize(
    ("bits", "size"), [(1, 64), (5, 64), (16, 64), (4, 0), (4, 48), (4, 512), (4, -1), (4.0, 64), (4, 64.0), ("4", 64)]
)
def test_unknown_grids(bits: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=r"must be one of"):
        quantize_groupwise(torch.ones(1, 64), bits, size)
    with pytest.raises(ValueError, match=r"must be one of"):
        encode_groupwise(torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1, 1), bits=bits, group_size=size)


def test_wrong_arguments_are_typed_errors() -> None:
    codes, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(InvalidTensorError, match="codes must be uint8"):
        encode_groupwise(codes.float(), scales, bits=4, group_size=64)
    with pytest.raises(InvalidTensorError, match=r"scales must be floating-point \[2, 1\]"):
        encode_groupwise(codes, torch.ones(2, 2), bits=4, group_size=64)
    with pytest.raises(InvalidTensorError, match="not finite or not exact"):
        encode_groupwise(codes, scales.double() / 3, bits=4, group_size=64)
    with pytest.raises(InvalidTensorError):
        encode_groupwise(codes + 16, scales, bits=4, group_size=64)
    with pytest.raises(InvalidTensorError, match="not exactly a finite float16"):
        encode_groupwise(codes, scales / 3, bits=4, group_size=64)
    with pytest.raises(InvalidTensorError, match="matrix or a stack"):
        GroupwiseTensor.quantize(torch.ones(1, 2, 3, 64))
    with pytest.raises(InvalidTensorError, match="dtype"):
        quantize_groupwise(torch.ones(2, 64, dtype=torch.int32))
    with pytest.raises(InvalidTensorError, match="rows, columns"):
        quantize_groupwise(torch.ones(64))
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        quantize_groupwise(torch.ones(2, 64), dtype=torch.float32)
    with pytest.raises(TypeError):
        quantize_groupwise([[1.0]])  # type: ignore[arg-type]


def test_numpy_bf16_and_any_stride_give_the_same() -> None:
    weight = torch.randn(64, 8).bfloat16()
    expected = quantize_groupwise(weight.float().T.contiguous(), 3, 16)
    for given in (weight.T, weight.T.float().numpy(), np.asfortranarray(weight.T.float().numpy())):
        found = quantize_groupwise(given, 3, 16)
        assert isinstance(found.codes, type(given)) and isinstance(found.scales, type(given))
        assert np.array_equal(found.codes, expected.codes) and np.array_equal(found.scales, expected.scales)


def test_codes_do_not_depend_on_threads() -> None:
    weight = torch.randn(1500, 700, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = GroupwiseTensor.quantize(weight, 4, 128)
        torch.set_num_threads(4)
        assert one == GroupwiseTensor.quantize(weight, 4, 128)
    finally:
        torch.set_num_threads(threads)


def test_files_copies_and_the_mode_of_products(tmp_path: object) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
    tensor = GroupwiseTensor.quantize(weight, 4, 32)
    tensor.save(f"{tmp_path}/w.safetensors")
    assert GroupwiseTensor.load(f"{tmp_path}/w.safetensors") == tensor
    assert pickle.loads(pickle.dumps(tensor)) == tensor == copy.deepcopy(tensor)
    assert "int" not in repr(tensor) and "bits=4" in repr(tensor)
    with pytest.raises(moepack.LoadError, match=r"TernaryTensor\.save"):
        moepack.TernaryTensor.load(f"{tmp_path}/w.safetensors")
    x = torch.randn(5, 128)
    exact, approximate = tensor.matmul(x), tensor.matmul(x, mode="int8")
    assert 0 < (exact - approximate).norm() / exact.norm() < 0.02
    assert tensor.matmul(x.bfloat16()).dtype == torch.bfloat16 and isinstance(tensor.matmul(x.numpy()), np.ndarray)
    with pytest.raises(ValueError, match="mode"):
        tensor.matmul(x, mode="fast")  # type: ignore[arg-type]
    with pytest.raises(CorruptionError):
        GroupwiseTensor(tensor.data[:-64])
