"""The compute mode of the process, a model and the environment; each matrix uses the mode it was given."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import moepack
from moepack import _core
from moepack.backends.compute import product_mode
from moepack.modules.experts import PackedExperts
from moepack.modules.linear import PackedLinear


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (1, 8, 64)).astype(np.uint8)
    data = _core.encode_groupwise(codes, np.ones((1, 8, 1), np.float32), None, bits=4, group_size=64, ndim=2)
    linear = PackedLinear(8, 64)
    linear.attach("packed", data)
    yield linear, data, torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
    moepack.set_compute_mode(None)


def test_the_mode_of_the_process_and_of_a_model(layer):
    linear, data, x = layer
    blob = _core.PackedTensor(data)
    exact, int8 = (torch.from_numpy(blob.matmul(x.numpy(), mode=mode)) for mode in ("exact", "int8"))
    assert not torch.equal(exact, int8)
    assert moepack.compute_mode() == "auto" and torch.equal(linear(x), exact)
    moepack.set_compute_mode("int8")
    assert moepack.compute_mode() == "int8" and torch.equal(linear(x), int8)
    moepack.set_compute_mode("exact", linear)
    assert torch.equal(linear(x), exact)
    linear.attach("packed", data)
    assert torch.equal(linear(x), exact)
    moepack.set_compute_mode(None, linear)
    assert torch.equal(linear(x), int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_layer_in_one_call_is_the_layer_in_three(tokens, dtype, layer):
    rng = np.random.default_rng(tokens)
    shapes = {"gate_proj": (6, 24, 64), "up_proj": (6, 24, 64), "down_proj": (6, 64, 24)}
    fused, split = (PackedExperts(shapes, act) for act in (torch.nn.SiLU(), lambda x: torch.nn.functional.silu(x)))
    for name, shape in shapes.items():
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        scales = np.full((*shape[:2], 2 if shape[2] > 32 else 1), 0.03125, np.float32)
        data = _core.encode_groupwise(codes, scales, None, bits=4, group_size=32, ndim=3)
        fused.attach(name, data)
        split.attach(name, data)
    x = torch.from_numpy(rng.standard_normal((tokens, 64)).astype(np.float32)).to(dtype)
    index = torch.from_numpy(rng.integers(0, 7, (tokens, 3)))
    weights = torch.from_numpy(rng.random((tokens, 3)).astype(np.float32))
    for mode in ("auto", "exact", "int8", "bf16"):
        moepack.set_compute_mode(mode)
        tolerance = {"rtol": 0.01, "atol": 1e-5 if dtype == torch.float32 and mode == "exact" else 0.01}
        torch.testing.assert_close(fused(x, index, weights), split(x, index, weights), **tolerance)
        assert [product_mode(fused.matrix(name), None) for name in shapes] == [mode] * 3


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (3, 128), (8, 32), (2, 16)])
def test_bf16_is_the_product_of_rounded_factors(bits, group_size, isa):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (1, 40, 256)).astype(np.uint8)
    scales = (rng.random((1, 40, 256 // group_size), np.float32) + 0.5).astype(np.float16).astype(np.float32)
    offsets = (-scales * 2 ** (bits - 1)).astype(np.float16).astype(np.float32)
    data = _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=group_size, ndim=2)
    blob = _core.PackedTensor(data)
    weights = torch.from_numpy(blob.dequantize()[0]).double()
    x = torch.from_numpy(rng.standard_normal((20, 256)).astype(np.float32))
    y = torch.from_numpy(blob.matmul(x.numpy(), mode="bf16", isa=isa)).double()
    # Both factors may differ by 2^-8; the rest is the error of float32 sums.
    bound = 2.1 / 256 * (x.double().abs() @ weights.abs().T) + 1e-3
    assert ((y - x.double() @ weights.T).abs() <= bound).all()
    as_bf16 = x.bfloat16()
    rounded = blob.matmul(as_bf16.view(torch.uint16).numpy(), mode="bf16", isa=isa)
    assert np.array_equal(rounded, blob.matmul(as_bf16.float().numpy(), mode="bf16", isa=isa))


def test_formats_without_a_mode_keep_their_own():
    rng = np.random.default_rng(0)
    codes = rng.integers(-1, 2, (1, 8, 64)).astype(np.int8)
    data = _core.encode_ternary(codes, np.tile(np.array([-1, 1], np.float32), (1, 8, 1)), ndim=2)
    linear = PackedLinear(8, 64)
    linear.attach("packed", data)
    x = torch.from_numpy(rng.standard_normal((12, 64)).astype(np.float32))
    expected = linear(x)
    moepack.set_compute_mode("int8", linear)
    assert torch.equal(linear(x), expected) and product_mode(linear.matrix("packed"), "int8") is None


def test_unknown_modes_are_refused(layer):
    for model in (None, layer[0]):
        with pytest.raises(ValueError, match="auto, exact, bf16, int8"):
            moepack.set_compute_mode("int4", model)


@pytest.mark.parametrize(
    ("value", "expected"), [("int8", "int8"), ("bf16", "bf16"), ("", "auto"), ("fast", "ValueError")]
)
def test_the_environment_chooses_the_first_mode(value, expected):
    program = "import moepack\ntry: print(moepack.compute_mode())\nexcept ValueError as e: print(type(e).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"MOEPACK_COMPUTE": value, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == expected
