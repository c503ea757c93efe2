"""The compute mode: of the process, of a model, of the environment; a matrix multiplies as it was told."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import moepack
from moepack import _core
from moepack.runtime.experts import PackedExperts
from moepack.runtime.linear import PackedLinear
from moepack.runtime.matrix import open_matrix


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (1, 8, 64)).astype(np.uint8)
    data = _core.encode_groupwise(codes, np.ones((1, 8, 1), np.float32), None, bits=4, group_size=64, rank=2)
    linear = PackedLinear(8, 64)
    linear.attach("packed", data)
    yield linear, data, torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
    moepack.set_compute_mode(None)


def test_the_mode_of_the_process_and_of_a_model(layer):
    linear, data, x = layer
    blob = _core.GroupwiseBlob(data)
    exact, int8 = (torch.from_numpy(blob.matmul(x.numpy(), mode=mode)) for mode in ("exact", "int8"))
    assert not torch.equal(exact, int8)
    assert moepack.compute_mode() == "exact" and torch.equal(linear(x), exact)
    moepack.set_compute_mode("int8")
    assert moepack.compute_mode() == "int8" and torch.equal(linear(x), int8)
    moepack.set_compute_mode("exact", linear)
    assert torch.equal(linear(x), exact)
    linear.attach("packed", data)
    assert torch.equal(linear(x), exact)
    moepack.set_compute_mode(None, linear)
    assert torch.equal(linear(x), int8)
    assert torch.equal(torch.from_numpy(open_matrix(data).matmul_grouped(x.numpy(), np.array([0, 3]))), int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_layer_in_one_call_is_the_layer_in_three(tokens, dtype, layer):
    rng = np.random.default_rng(tokens)
    shapes = {"gate_proj": (6, 24, 64), "up_proj": (6, 24, 64), "down_proj": (6, 64, 24)}
    fused, split = (PackedExperts(shapes, act) for act in (torch.nn.SiLU(), lambda x: torch.nn.functional.silu(x)))
    for name, shape in shapes.items():
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        scales = np.full((*shape[:2], 2 if shape[2] > 32 else 1), 0.03125, np.float32)
        data = _core.encode_groupwise(codes, scales, None, bits=4, group_size=32, rank=3)
        fused.attach(name, data)
        split.attach(name, data)
    x = torch.from_numpy(rng.standard_normal((tokens, 64)).astype(np.float32)).to(dtype)
    index = torch.from_numpy(rng.integers(0, 7, (tokens, 3)))
    weights = torch.from_numpy(rng.random((tokens, 3)).astype(np.float32))
    for mode in ("exact", "int8"):
        moepack.set_compute_mode(mode)
        tolerance = {"rtol": 0.01, "atol": 0.01 if dtype == torch.bfloat16 or mode == "int8" else 1e-5}
        torch.testing.assert_close(fused(x, index, weights), split(x, index, weights), **tolerance)
    for module in (fused, split):
        module.matrix("up_proj").mode = "exact"
    torch.testing.assert_close(fused(x, index, weights), split(x, index, weights), rtol=0.02, atol=0.02)


def test_unknown_modes_are_refused(layer):
    for model in (None, layer[0]):
        with pytest.raises(ValueError, match="exact, int8"):
            moepack.set_compute_mode("int4", model)


@pytest.mark.parametrize(("value", "expected"), [("int8", "int8"), ("", "exact"), ("fast", "ValueError")])
def test_the_environment_chooses_the_first_mode(value, expected):
    program = "import moepack\ntry: print(moepack.compute_mode())\nexcept ValueError as e: print(type(e).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"MOEPACK_COMPUTE": value, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == expected
