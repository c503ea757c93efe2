"""Codebook tensors: golden files by two implementations, the public tensor, products against NumPy within bounds."""

import copy
import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import moepack
from moepack import CodebookTensor, InvalidTensorError, _core, encode_codebook, lut_matmul
from moepack.registry import open_tensor
from moepack.solvers.activations import round_activations
from moepack.solvers.fixed_point import fixed_point
from oracle import codebook as oracle
from places import GOLDEN

FOLDER = GOLDEN / "codebook"
CASES = json.loads((FOLDER / "cases.json").read_text())


def golden(case: dict[str, Any]) -> oracle.Tensor:
    shape = case["shape"]
    books = (*shape[:2], -(-shape[2] // case["block"]))
    codes = np.frombuffer(bytes.fromhex(case["codes"]), np.uint8).reshape(shape)
    centroids = np.array(case["centroids"], np.int16).reshape(*books, 1 << case["bits"])
    scales = np.array(case["scales"], np.float32).reshape(books)
    return oracle.Tensor(
        case["bits"],
        case["block"],
        case["rank"],
        case["activation_bits"],
        codes,
        centroids,
        scales,
        case.get("hadamard", 1),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case: dict[str, Any]) -> None:
    data, expected = np.fromfile(FOLDER / f"{case['name']}.bin", np.uint8), golden(case)
    blob = _core.PackedTensor(data)
    blob.verify()
    details = blob.details()
    assert (details["bits"], blob.ndim, details["block_size"]) == (case["bits"], case["rank"], case["block"])
    assert (details["activation_bits"], details["hadamard"]) == (case["activation_bits"], expected.hadamard)
    assert _core.packed_bytes(blob.kind, blob.shape, **details) == blob.nbytes == len(data)
    for name in ("scales", "centroids"):
        np.testing.assert_array_equal(blob.parameters(name), getattr(expected, name))
    np.testing.assert_array_equal(blob.decode(), expected.codes)
    close = 0 if expected.hadamard == 1 else 1e-6
    np.testing.assert_allclose(blob.dequantize(), expected.weights(), rtol=close, atol=close)
    again = _core.encode_codebook(
        expected.codes.copy(), expected.centroids, expected.scales, bits=case["bits"], block=case["block"],
        ndim=blob.ndim, activation_bits=case["activation_bits"], hadamard=expected.hadamard,
    )  # fmt: skip
    assert again.tobytes() == data.tobytes() == oracle.write(expected)


def test_every_file_is_a_case() -> None:
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in FOLDER.glob("*.bin"))


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [None, 128])
def test_quantize_clusters_and_the_blob_keeps_it(bits: int, block: int | None) -> None:
    given = weight(2, 5, 300)
    tensor = CodebookTensor.quantize(given, bits, block, importance=torch.rand(2, 300))
    tensor.verify()
    values = tensor.dequantize()
    assert tensor.shape == given.shape and tensor.bits == bits
    assert tensor.block_size == (block or 384)
    for start in range(0, 300, block or 300):
        part = values[..., start : start + (block or 300)]
        assert max(len(row.unique()) for row in part.flatten(0, 1)) <= 1 << bits
    error = ((values - given).square().mean() / given.square().mean()).sqrt()
    assert error < {2: 0.4, 3: 0.22, 4: 0.13}[bits]
    assert pickle.loads(pickle.dumps(tensor)) == tensor == copy.deepcopy(tensor)


def test_fixed_point_is_close_and_encoding_it_again_changes_nothing() -> None:
    centroids = weight(7, 16) * torch.logspace(-30, 30, 7)[:, None]
    centroids[3] = 0
    stored = fixed_point(centroids)
    assert ((stored.values() - centroids).abs() <= centroids.abs().amax(-1, True) * 2**-15).all()
    codes = torch.arange(16, dtype=torch.uint8).expand(7, 16)
    tensor = encode_codebook(codes, centroids)
    torch.testing.assert_close(tensor.dequantize(), stored.values(), rtol=0, atol=0)
    assert fixed_point(torch.full((1, 4), 1e-45)).values().abs().max() == 0


@pytest.mark.parametrize("activation_bits", [4, 8])
def test_rounded_activations_take_one_byte_a_centroid(activation_bits: int) -> None:
    centroids = weight(16, 16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 16)
    tensor = encode_codebook(codes, centroids, activation_bits=activation_bits)
    tensor.verify()
    torch.testing.assert_close(tensor.dequantize()[:, :16], fixed_point(centroids, 8).values(), rtol=0, atol=0)
    # Of 256 columns: 4 bits a code, 8 a centroid, 64 for a scale and a sum.
    assert 8 * (tensor.nbytes - 128) == 16 * 256 * 4.75
    x = weight(3, 256, seed=1)
    y = tensor.matmul(x)
    torch.testing.assert_close(y, round_activations(x, activation_bits) @ tensor.dequantize().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(y, tensor.matmul(x, "int16"))


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("mode", ["exact", "int16", "int8"])
@pytest.mark.parametrize("activation_bits", [4, 8])
def test_products_are_within_the_stated_bounds(isa: str, bits: int, mode: str, activation_bits: int) -> None:
    tensor = CodebookTensor.quantize(weight(3, 21, 270), bits, 128)
    weights = tensor.dequantize().double().numpy()
    x = weight(13, 270, seed=1).numpy()
    offsets = np.array([0, 1, 1, 13])
    y = _core.PackedTensor(tensor._data).matmul_grouped(x, offsets, mode=mode, activation_bits=activation_bits, isa=isa)
    steps = (np.maximum(x.max(1), 0) - np.minimum(x.min(1), 0)) / (2**activation_bits - 1)
    for expert in range(3):
        for token in range(offsets[expert], offsets[expert + 1]):
            expected = weights[expert] @ x[token].astype(float)
            size = np.abs(weights[expert]) @ np.abs(x[token])
            bound = (270 / 16 + 3 + 7) * 2**-24 * size
            if mode != "exact":
                bound += steps[token] * 0.501 * np.abs(weights[expert]).sum(1)
            if mode == "int8":
                largest = np.abs(weights[expert]).max(1) / 32_639
                bound += 128 * largest * (np.abs(x[token]) + steps[token]).sum()
            assert (np.abs(y[token] - expected) <= bound).all()


def test_lut_matmul_looks_up_and_multiplies() -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (9, 40)).astype(np.uint8)
    codebook = generator.standard_normal((9, 16)).astype(np.float32)
    x = generator.standard_normal((5, 40)).astype(np.float32)
    expected = x @ np.take_along_axis(codebook, codes.astype(np.int64), 1).T
    y = lut_matmul(codes, codebook, x, mode="exact")
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, expected, atol=2e-3)
    one = lut_matmul(torch.from_numpy(codes), torch.from_numpy(codebook), torch.from_numpy(x[0]), mode="int8")
    np.testing.assert_allclose(one.numpy(), expected[0], atol=0.5)


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0), (0, 4), (2, 0, 4), (0, 3, 4)])
def test_lut_matmul_of_nothing_is_zeros(shape: tuple[int, ...]) -> None:
    codes, codebook = np.zeros(shape, np.uint8), np.ones((*shape[:-1], 4), np.float32)
    y = lut_matmul(codes, codebook, np.ones((*shape[:-2], 5, shape[-1]), np.float32))
    np.testing.assert_array_equal(y, np.full((*shape[:-2], 5, shape[-2]), shape[-1], np.float32))


def test_the_runtime_multiplies_as_the_tensor_asks() -> None:
    for activation_bits, name in ((0, "codebook-4bit"), (8, "codebook-4bit-a8"), (4, "codebook-4bit-a4")):
        tensor = CodebookTensor.quantize(weight(2, 6, 40), activation_bits=activation_bits)
        matrix = open_tensor(tensor._data)
        assert matrix.format == name and matrix.shape == (2, 6, 40)
        x, offsets = weight(4, 40).numpy(), np.array([0, 1, 4])
        mode = "int8" if activation_bits else "auto"
        expected = _core.PackedTensor(tensor._data).matmul_grouped(
            x, offsets, mode=mode, activation_bits=activation_bits or 8
        )
        np.testing.assert_array_equal(matrix.matmul_grouped(x, offsets), expected)
        exact = CodebookTensor(tensor._data).dequantize().numpy()
        products = [x[:1] @ exact[0].T, x[1:] @ exact[1].T]
        np.testing.assert_allclose(matrix.matmul_grouped(x, offsets, "exact"), np.concatenate(products), atol=1e-4)


@pytest.mark.parametrize("mode", ["auto", "exact", "int8"])
@pytest.mark.parametrize("activation_bits", [0, 5, 16])
def test_products_round_activations_to_4_or_8_bits(mode: Any, activation_bits: int) -> None:
    codes, books, x = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 16), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=f"to 4 or 8 bits, not {activation_bits}"):
        lut_matmul(codes, books, x, mode=mode, activation_bits=activation_bits)


def test_invalid_settings_are_rejected(tmp_path: pathlib.Path) -> None:
    good = CodebookTensor.quantize(weight(3, 40))
    with pytest.raises(ValueError, match="bits"):
        CodebookTensor.quantize(weight(3, 40), 5)
    with pytest.raises(ValueError, match="multiple of 128"):
        CodebookTensor.quantize(weight(3, 40), block=100)
    with pytest.raises(InvalidTensorError, match="nan"):
        CodebookTensor.quantize(torch.full((2, 4), torch.nan))
    with pytest.raises(InvalidTensorError, match="columns"):
        CodebookTensor.quantize(torch.zeros(2, 0))
    with pytest.raises(InvalidTensorError, match="K of 4, 8 or 16, got \\[2, 5\\]"):
        encode_codebook(np.zeros((2, 4), np.uint8), np.zeros((2, 5), np.float32))
    with pytest.raises(InvalidTensorError, match=r"shape \[3, 1, 4\], but codes of shape \[2, 4\] .* need \[2, 1, 4\]"):
        encode_codebook(np.zeros((2, 4), np.uint8), np.zeros((3, 4), np.float32))
    with pytest.raises(InvalidTensorError, match="floating-point"):
        encode_codebook(np.zeros((2, 4), np.uint8), np.zeros((2, 4), np.int32))
    with pytest.raises(InvalidTensorError, match="code 7"):
        encode_codebook(np.full((2, 4), 7, np.uint8), np.zeros((2, 4), np.float32))
    with pytest.raises(InvalidTensorError, match="infinite"):
        encode_codebook(np.zeros((2, 4), np.uint8), np.full((2, 4), np.inf, np.float32))
    with pytest.raises(ValueError, match="unknown mode"):
        good.matmul(torch.zeros(1, 40), "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 or 8 bits"):
        good.matmul(torch.zeros(1, 40), "int8", 5)
    with pytest.raises(moepack.CorruptionError):
        CodebookTensor(good._data[:-64].copy())
    older = good._data.copy()
    older[11] = 8
    with pytest.raises(moepack.CorruptionError, match=r"older version of moepack.*pack the model again"):
        CodebookTensor(older)
    damaged = good._data.copy()
    damaged[128 + 2 * 256 : 128 + 2 * 256 + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    with pytest.raises(moepack.CorruptionError, match="expert 0 row 0 block 0: scale NaN"):
        CodebookTensor(damaged).verify()
