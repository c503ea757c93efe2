"""`CodedTensor`: sizes and errors of quantized weights, exact packing, products, files, and unusual input."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

import moepack
from moepack import CodedTensor, CorruptionError, InvalidTensorError, encode_coded
from oracle.coded import dependent


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss(weight: torch.Tensor, tensor: CodedTensor) -> float:
    return float((tensor.dequantize(torch.float64) - weight).norm() / weight.double().norm())


@pytest.mark.parametrize("codes", ["dependent", "plain"])
@pytest.mark.parametrize("bits", [0.6, 1.0, 1.5, 2.25, 4.0, 5.5, 8.0])
def test_a_size_is_met_and_never_exceeded(bits: float, codes: str) -> None:
    tensor = CodedTensor.quantize(normal(2, 256, 512), bits, codes=codes)  # type: ignore[arg-type]
    assert 0.985 * bits <= tensor.bits_per_weight <= bits
    assert tensor.symbols.startswith("dependent" if codes == "dependent" and 1.25 <= bits <= 5 else "plain")
    tensor.verify()


@pytest.mark.parametrize("unit", [2.0**-60, 3e-4, 1.0, 2.0**60])
def test_errors_fall_with_bits_in_any_unit_of_the_weights(unit: float) -> None:
    weight = normal(128, 512) * unit
    losses = [loss(weight, CodedTensor.quantize(weight, bits)) for bits in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)]
    assert losses == sorted(losses, reverse=True)
    # Shannon's bound of a Gaussian is 2^-bits; plain codes, above 5 bits, are 1.2 times as far from zero.
    for bits, own in zip((2, 3, 4, 6), losses[1:5], strict=True):
        assert 2.0**-bits < own < (1.2 if bits <= 5 else 1.35) * 2.0**-bits


def test_dependent_codes_have_less_error() -> None:
    weight = normal(256, 512)
    plain, paths = (CodedTensor.quantize(weight, 3.0, codes=codes) for codes in ("plain", "dependent"))
    assert loss(weight, paths) < 0.93 * loss(weight, plain)


@pytest.mark.parametrize("codes", ["dependent", "plain"])
@pytest.mark.parametrize("step", [0.02, 0.3, 1.0, 3.0])
def test_a_step_is_that_of_the_grid(step: float, codes: str) -> None:
    weight = normal(2, 64, 256)
    tensor = CodedTensor.quantize(weight, step=step, codes=codes)  # type: ignore[arg-type]
    share = 4 if tensor.symbols == "dependent" else 1
    assert tensor.scales.item() == np.float32(step / share)
    assert torch.equal(tensor.dequantize(), tensor.decode().float() * tensor.scales)
    rate = tensor.bits_per_weight
    # At high rates, the error of a uniform grid is its step / sqrt(12).
    if step < 0.1:
        assert tensor.symbols.startswith("plain+") and rate > 6
        assert loss(weight, tensor) == pytest.approx(step / math.sqrt(12), rel=0.05)


def test_blocks_of_zeros_get_plain_codes_and_zero_stays_zero() -> None:
    weight = normal(64, 256)
    weight[16:32] = 0
    tensor = CodedTensor.quantize(weight, 3.0)
    assert tensor.symbols == "plain" and not tensor.dequantize()[16:32].any()
    assert not CodedTensor.quantize(torch.zeros(64, 256), 2.0).dequantize().any()


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64), (3, 4, 0), (0, 5), (5, 0), (1, 1), (17, 33), (3, 17, 33)])
def test_small_and_empty_shapes(shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape)
    tensor = CodedTensor.quantize(weight, step=0.25)
    assert tensor.shape == shape and tensor.ndim == len(shape)
    assert torch.allclose(tensor.dequantize(), weight, atol=0.25)
    x = torch.ones(*shape[:-2], 2, shape[-1])
    assert tensor.matmul(x).shape == (*shape[:-2], 2, shape[-2])
    tensor.verify()
    if not weight.numel():
        assert CodedTensor.quantize(weight, 2.0).shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types_and_strides_give_the_same_bytes(dtype: torch.dtype) -> None:
    weight = normal(96, 48).bfloat16().to(dtype)
    expected = CodedTensor.quantize(weight.float(), 3.0)
    assert CodedTensor.quantize(weight, 3.0) == expected
    assert CodedTensor.quantize(weight.T.contiguous().T, 3.0) == expected
    if dtype != torch.bfloat16:
        assert CodedTensor.quantize(np.asfortranarray(weight.numpy()), 3.0) == expected


def test_threads_do_not_change_bytes() -> None:
    weight, threads = normal(300, 200), moepack._core.threads()
    found = []
    try:
        for count in (1, 3):
            moepack._core.set_threads(count)
            found.append(CodedTensor.quantize(weight, 2.5))
    finally:
        moepack._core.set_threads(threads)
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["auto", "exact", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(40, 96), (3, 40, 96)])
def test_products_and_gradients_match_the_weights(shape: tuple[int, ...], mode: str) -> None:
    tensor = CodedTensor.quantize(normal(*shape), 3.0)
    weight, x = tensor.dequantize(), normal(*shape[:-2], 5, shape[-1], seed=1).requires_grad_()
    product = tensor.matmul(x, mode=mode)  # type: ignore[arg-type]
    torch.testing.assert_close(product, x @ weight.mT, rtol=0.02, atol=1e-4 if mode == "exact" else 0.3)
    product.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(product) @ weight, rtol=1e-4, atol=1e-3)
    assert tensor.matmul(x.detach().bfloat16()).dtype == torch.bfloat16
    assert isinstance(tensor.matmul(x.detach().numpy()), np.ndarray)


@pytest.mark.parametrize("symbols", ["plain", "plain+3", "dependent"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("shape", [(20, 30), (2, 20, 30)])
def test_given_codes_are_packed_exactly(shape: tuple[int, ...], dtype: torch.dtype, symbols: str) -> None:
    codes = (normal(*shape) * 4).round().to(torch.int64)
    if symbols == "dependent":
        codes = torch.from_numpy(dependent(codes.reshape(-1, 20, 30).numpy())).reshape(shape)
    codes, rows, columns = codes.to(dtype), normal(*shape[:-1], seed=1), normal(shape[-1], seed=2)
    for scales, stored in ((torch.tensor(0.25), ()), (torch.tensor([0.25]), ()), (rows, rows.shape)):
        for own in (None, columns, columns[None]):
            tensor = encode_coded(codes, scales, columns=own, symbols=symbols)
            assert torch.equal(tensor.decode(), codes.int()) and tensor.decode().dtype == torch.int32
            assert tensor.scales.shape == stored and torch.equal(tensor.scales, scales.reshape(stored))
            values = codes.float() * (scales.reshape(stored)[..., None] if stored else scales)
            if own is None:
                assert tensor.column_scales is None
            else:
                assert torch.equal(tensor.column_scales, columns[None])  # type: ignore[arg-type]
                values *= columns
            assert torch.equal(tensor.dequantize(), values)
            assert tensor.dtype == (torch.bfloat16 if own is None and not stored else torch.float32)


def test_codes_of_any_size_are_decoded() -> None:
    codes = torch.zeros(4, 8, dtype=torch.int32)
    codes[2, 3] = 1 << 30
    assert torch.equal(encode_coded(codes, torch.tensor(1.0)).decode(), codes)


def test_files_and_copies(tmp_path: object) -> None:
    tensor = CodedTensor.quantize(normal(32, 128), 3.0)
    tensor.save(f"{tmp_path}/w.safetensors")
    assert CodedTensor.load(f"{tmp_path}/w.safetensors") == tensor
    assert CodedTensor.load(f"{tmp_path}/w.safetensors", resident=True) == tensor
    assert pickle.loads(pickle.dumps(tensor)) == tensor == copy.deepcopy(tensor)
    assert "symbols='dependent'" in repr(tensor)
    with pytest.raises(moepack.LoadError, match=r"GroupwiseTensor\.save"):
        moepack.GroupwiseTensor.load(f"{tmp_path}/w.safetensors")
    with pytest.raises(CorruptionError):
        CodedTensor(tensor.data[:-64])
    with pytest.raises(CorruptionError, match="not a coded one"):
        CodedTensor(moepack.GroupwiseTensor.quantize(normal(4, 64)).data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named_with_their_place(value: float) -> None:
    weight = torch.ones(2, 3, 40)
    weight[1, 2, 39] = value
    with pytest.raises(InvalidTensorError, match=r"holds (nan|inf|-inf) at \[1, 2, 39\]"):
        CodedTensor.quantize(weight, 2.0)
    with pytest.raises(InvalidTensorError, match=r"holds (nan|inf|-inf) at \[2, 39\]"):
        CodedTensor.quantize(weight[1], 2.0)


def test_wrong_arguments_are_typed_errors() -> None:
    weight, codes, one = normal(16, 64), torch.zeros(2, 64, dtype=torch.int8), torch.tensor(1.0)
    for settings in ({}, {"bits_per_weight": 2.0, "step": 0.1}):
        with pytest.raises(ValueError, match="either bits_per_weight or step"):
            CodedTensor.quantize(weight, **settings)  # type: ignore[arg-type]
    for bits in (0.0, 0.3, 8.5, math.nan):
        with pytest.raises(ValueError, match="bits_per_weight must be"):
            CodedTensor.quantize(weight, bits)
    for step in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="step must be positive"):
            CodedTensor.quantize(weight, step=step)
    with pytest.raises(ValueError, match="codes must be dependent or plain"):
        CodedTensor.quantize(weight, 2.0, codes="pairs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metadata alone"):
        CodedTensor.quantize(normal(2, 8), 2.0)
    with pytest.raises(InvalidTensorError, match="too large for a step"):
        CodedTensor.quantize(weight * 1e12, step=1e-3)
    for bad in (torch.ones(64), torch.ones(1, 2, 3, 4), torch.ones(4, 4, dtype=torch.int32)):
        with pytest.raises(InvalidTensorError, match="expected floating-point"):
            CodedTensor.quantize(bad, 2.0)
    with pytest.raises(TypeError):
        CodedTensor.quantize([[1.0]], 2.0)  # type: ignore[arg-type]
    for bad in (codes.float(), codes.long(), codes[0]):
        with pytest.raises(InvalidTensorError, match="codes must be int8"):
            encode_coded(bad, one)
    for bad in (torch.ones(3), torch.ones(2, 64), torch.ones(1, 2)):
        with pytest.raises(InvalidTensorError, match="scales have shape"):
            encode_coded(codes, bad)
        with pytest.raises(InvalidTensorError, match="column scales have shape"):
            encode_coded(codes, one, columns=bad[..., :3])
    for bad in (one * math.nan, one.double() / 3):
        with pytest.raises(InvalidTensorError, match="not finite or not exact"):
            encode_coded(codes, bad)
    with pytest.raises(InvalidTensorError, match="must be floating-point"):
        encode_coded(codes, torch.tensor(1))
    with pytest.raises(ValueError, match="symbols are plain"):
        encode_coded(codes, one, symbols="pairs")
    with pytest.raises(InvalidTensorError, match="no path of states"):
        encode_coded(codes, one, symbols="dependent")


def test_weights_whose_squares_exceed_float32_are_refused() -> None:
    weights = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found, expected = (moepack.CodedTensor.quantize(weights * factor, 4.0).dequantize() for factor in (2.0**60, 1.0))
    assert torch.equal(found / 2.0**60, expected)
    with pytest.raises(InvalidTensorError, match=r"too large: their squares exceed float32"):
        moepack.CodedTensor.quantize(weights * 5e37, 4.0)
