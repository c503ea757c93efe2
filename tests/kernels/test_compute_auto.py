"""The mode auto: few tokens as in exact, many within bf16 rounding; tensors for rounded activations round them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import moepack
from moepack import _core
from moepack.methods import create
from moepack.methods.qmoe.ternary import Ternary

ROWS, COLUMNS, MANY = 80, 384, 96
Bytes = NDArray[np.uint8]


def integers(bits: int) -> Bytes:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (1, ROWS, COLUMNS)).astype(np.uint8)
    scales = (rng.random((1, ROWS, COLUMNS // 64), np.float32) + 0.5).astype(np.float16).astype(np.float32)
    offsets = (-scales * 2 ** (bits - 1)).astype(np.float16).astype(np.float32)
    return _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=64, ndim=2)


def compensated() -> Bytes:
    rng = np.random.default_rng(0)
    right, left = (
        (rng.integers(0, 8, (4, n)).astype(np.uint8), np.full((4, -(-n // 64)), 0.25, np.float32))
        for n in (COLUMNS, ROWS)
    )
    return _core.encode_compensated(integers(3), np.array([4]), right, left, bits=3)


def codebook(bits: int, activation_bits: int = 0, hadamard: int = 1) -> Bytes:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (1, ROWS, COLUMNS)).astype(np.uint8)
    top, unit = (127, 256) if activation_bits else (32639, 1)
    centroids = (rng.integers(-top, top + 1, (1, ROWS, 3, 1 << bits)) * unit).astype(np.int16)
    scales = rng.uniform(1e-5, 2e-5, (1, ROWS, 3)).astype(np.float32)
    return _core.encode_codebook(
        codes, centroids, scales, bits=bits, block=128, ndim=2, activation_bits=activation_bits, hadamard=hadamard
    )


def ternary(code: str) -> Bytes:
    rng = np.random.default_rng(0)
    codes = rng.choice(np.array([-1, 0, 1], np.int8), (1, ROWS, COLUMNS), p=[0.06, 0.88, 0.06])
    levels = rng.uniform(0.5, 1, (1, ROWS, 2)).astype(np.float32) * np.array([-1, 1], np.float32)
    return _core.encode_ternary(codes, levels, ndim=2, code=code)


FORMATS: dict[str, Callable[[], Bytes]] = {
    **{f"int{bits}": lambda bits=bits: integers(bits) for bits in (2, 3, 4, 8)},
    "compensated": compensated,
    **{f"codebook{bits}": lambda bits=bits: codebook(bits) for bits in (2, 3, 4)},
    "rotated codebook4": lambda: codebook(4, hadamard=128),
    "fsv8": lambda: ternary("fsv8"),
    "dict16": lambda: ternary("dict16"),
}


@pytest.fixture(params=FORMATS, scope="module")
def tensor(request: pytest.FixtureRequest) -> _core.PackedTensor:
    return _core.PackedTensor(FORMATS[request.param]())


def activations(tokens: int) -> NDArray[np.float32]:
    return np.random.default_rng(tokens).standard_normal((tokens, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("isa", _core.available_isas())
def test_one_token_is_exact(tensor: _core.PackedTensor, isa: str) -> None:
    x = activations(1)
    assert np.array_equal(tensor.matmul(x, mode="auto", isa=isa), tensor.matmul(x, mode="exact", isa=isa))


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("mode", ["auto", "bf16"])
def test_many_tokens_are_products_of_rounded_factors(tensor: _core.PackedTensor, mode: str, isa: str) -> None:
    x = activations(MANY)
    weights = np.abs(tensor.dequantize()[0].astype(np.float64))
    expected = x.astype(np.float64) @ tensor.dequantize()[0].astype(np.float64).T
    # Both factors may differ by 2^-8; rotations spread activations, bounded by norms.
    size = np.abs(x).astype(np.float64) @ weights.T
    if tensor.details().get("hadamard", 1) > 1:
        size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    found = tensor.matmul(x, mode=mode, isa=isa)
    assert (np.abs(found - expected) <= 2.1 / 256 * size + 1e-3).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tensors_made_for_rounded_activations_round_them(bits: int) -> None:
    tensor, x = _core.PackedTensor(codebook(bits, activation_bits=8)), activations(MANY)
    assert np.array_equal(tensor.matmul(x, mode="auto"), tensor.matmul(x, mode="int8"))


def test_auto_is_every_formats_default(tensor: _core.PackedTensor) -> None:
    x = activations(MANY)
    assert tensor.modes[0] == "auto"
    assert np.array_equal(tensor.matmul(x), tensor.matmul(x, mode="auto"))


def test_a_models_loss_moves_by_less_than_a_thousandth(mixtral: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    calibrated = {"calibration": str(text), "samples": 2, "sequence_length": 16}
    for method in create("codequant", **calibrated), Ternary(), create("finequant"):
        packed = tmp_path / method.name
        moepack.compress(mixtral, packed, method=method)
        losses = [moepack.evaluate(packed, text, mode=mode).loss for mode in ("exact", "auto")]
        assert abs(losses[0] - losses[1]) < 0.001, (method.name, losses)
