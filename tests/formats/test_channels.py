"""Channels tensors: golden files by two implementations, and the sparse layer against its reference."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from moepack import _core
from moepack.backends.cpu.backend import CpuBackend
from moepack.groupwise import GroupwiseTensor
from oracle import channels as oracle
from places import GOLDEN

FOLDER = GOLDEN / "channels"
CASES = json.loads((FOLDER / "cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case: dict[str, Any]) -> None:
    data = np.fromfile(FOLDER / f"{case['name']}.bin", np.uint8)
    experts, channels, half = case["shape"]
    blob = _core.PackedTensor(data)
    blob.verify()
    assert (blob.kind, blob.shape, blob.ndim) == ("channels", (experts, channels, 2 * half), 3)
    assert _core.packed_bytes("channels", blob.shape, **blob.details()) == blob.nbytes == len(data)
    values = np.array(case["values"], np.float32).reshape(blob.shape)
    np.testing.assert_array_equal(blob.dequantize(), values)
    thresholds = np.array([float(value) for value in case["thresholds"]], np.float32)
    np.testing.assert_array_equal(blob.parameters("thresholds"), thresholds)
    if case["bits"] == 16:
        records: Any = (values.view(np.uint32) >> 16).astype(np.uint16)
        codes = records.astype(np.int64)
        scales = np.zeros((experts, channels, 2, 0), np.float32)
    else:
        records = blob.decode(), blob.parameters("scales")
        codes = records[0].astype(np.int64) - (1 << case["bits"] - 1)
        scales = records[1].reshape(experts, channels, 2, -(-half // oracle.GROUP))
    assert _core.encode_channels(records, thresholds, bits=case["bits"]).tobytes() == data.tobytes()
    made = oracle.Tensor(case["bits"], codes, scales, thresholds)
    np.testing.assert_array_equal(made.weights(), values)
    assert oracle.write(made) == data.tobytes()


def test_every_file_is_a_case() -> None:
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in FOLDER.glob("*.bin"))


@pytest.fixture
def sparse() -> tuple[GroupwiseTensor, Any, torch.Tensor]:
    """Up projections, bf16 records, and thresholds that skip about half, nothing and everything."""
    torch.manual_seed(0)
    up = GroupwiseTensor.quantize(torch.randn(3, 150, 96) / 10, bits=2, symmetric=False)
    records = (torch.randn(3, 150, 192) / 10).bfloat16()
    thresholds = torch.tensor([0.6, 0.0, torch.inf])
    blob = _core.encode_channels(records.view(torch.uint16).numpy(), thresholds.numpy(), bits=16)
    return up, _core.PackedTensor(blob), thresholds


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_a_sparse_layer_is_the_equations(sparse: tuple[GroupwiseTensor, Any, torch.Tensor], tokens: int) -> None:
    up, channels, thresholds = sparse
    x, weights = torch.randn(tokens, 96), torch.rand(tokens, 2)
    index = torch.stack([torch.arange(tokens) % 3, (torch.arange(tokens) + 1) % 4], dim=1)  # 3 is not an expert
    records = torch.from_numpy(channels.dequantize())
    expected, computed = oracle.layer(up.dequantize(), records, thresholds, x, index, weights)
    matrix, arrays = _core.PackedTensor(up.data), (x.numpy(), index.numpy(), weights.numpy())
    for isa in _core.available_isas():
        y, count = _core.sparse_experts(matrix, channels, *arrays, "exact", isa)
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * float(expected.abs().max() + 1))
        assert abs(count - computed) <= 1  # an output of the up projection may lie on the threshold
        before = _core.threads()
        for threads in (1, 8):
            _core.set_threads(threads)
            assert np.array_equal(_core.sparse_experts(matrix, channels, *arrays, "exact", isa)[0], y)
        _core.set_threads(before)


@pytest.mark.parametrize("bits", [2, 8])
def test_up_projections_of_two_bits_decide_by_activations_of_eight(
    sparse: tuple[GroupwiseTensor, Any, torch.Tensor], bits: int
) -> None:
    channels, cpu = sparse[1], CpuBackend()
    up = _core.PackedTensor(GroupwiseTensor.quantize(torch.randn(3, 150, 96) / 10, bits=bits, symmetric=False).data)
    x, index, weights = torch.randn(2, 96), torch.tensor([[0, 1], [1, 2]]), torch.rand(2, 2)
    for mode, deciding in (("auto", "int8" if bits == 2 else "auto"), ("exact", "exact"), ("int8", "int8")):
        y, _ = cpu.sparse_experts((up, channels), x, index, weights, mode)
        expected, _ = _core.sparse_experts(up, channels, x.numpy(), index.numpy(), weights.numpy(), deciding)
        np.testing.assert_array_equal(y, expected)
        ups = cpu.wanted_channels((up, channels), x, index, mode)
        assert torch.equal(cpu.sparse_channels(channels, x, index, weights, ups)[0], y)


def test_invalid_channels_tensors_are_rejected(sparse: tuple[GroupwiseTensor, Any, torch.Tensor]) -> None:
    up, channels, _ = sparse
    matrix = _core.PackedTensor(up.data)
    x, index, weights = np.zeros((1, 96), np.float32), np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    with pytest.raises(_core.CorruptionError, match="magic"):
        _core.sparse_experts(matrix, matrix, x, index, weights)
    with pytest.raises(ValueError, match="channels"):
        _core.sparse_experts(channels, channels, x.repeat(2, 1), index, weights)
    with pytest.raises(ValueError, match="mode"):
        _core.sparse_experts(matrix, channels, x, index, weights, "int7")
