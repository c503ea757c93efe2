"""Golden compensated tensors: two implementations read and write the same bytes."""

import json
from typing import Any

import numpy as np
import pytest

from moepack import _core
from oracle import compensated as oracle
from places import GOLDEN

FOLDER = GOLDEN / "compensated"
CASES = json.loads((FOLDER / "cases.json").read_text())


def encode(tensor: oracle.Tensor, base: np.ndarray) -> np.ndarray:
    """Bytes written by the core."""
    ranks = np.array(tensor.ranks, np.int64)
    right, left = tensor.right, tensor.left
    if right.codes is None or right.scales is None or left.codes is None or left.scales is None:
        assert right.values is not None and left.values is not None
        return _core.encode_compensated(base, ranks, right.values, left.values, bits=tensor.bits)
    return _core.encode_compensated(
        base, ranks, (right.codes, right.scales), (left.codes, left.scales), bits=tensor.bits
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case: dict[str, Any]) -> None:
    data = np.fromfile(FOLDER / f"{case['name']}.bin", np.uint8)
    blob = _core.PackedTensor(data)
    blob.verify()
    assert [*blob.shape] == case["shape"]
    details = blob.details()
    assert (blob.ndim, details["rank_bits"]) == (case["rank"], case["rank_bits"])
    assert blob.parameters("ranks").tolist() == case["ranks"]
    tensor = oracle.read(data.tobytes())
    base = tensor.base
    assert [details[name] for name in ("bits", "symmetric", "dtype")] == [base.bits, base.offsets is None, base.dtype]
    assert _core.packed_bytes(blob.kind, blob.shape, **details) == blob.nbytes == len(data)
    probe, expected = np.arange(blob.shape[2]) % 7 - 3.0, np.reshape(case["products"], case["shape"][:2])
    np.testing.assert_allclose(tensor.weights() @ probe, expected, atol=1e-9)
    np.testing.assert_allclose(blob.dequantize() @ probe, expected, atol=1e-3)
    np.testing.assert_allclose(blob.dequantize(), tensor.weights(), atol=1e-5)
    plain = data[128 : 128 + int(data[16:24].view(np.uint64)[0])]
    assert encode(tensor, plain.copy()).tobytes() == data.tobytes()
    assert oracle.write(tensor) == data.tobytes()


def test_every_file_is_a_case() -> None:
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in FOLDER.glob("*.bin"))
    assert {case["rank_bits"] for case in CASES} == {3, 8, 16}


@pytest.mark.parametrize("name", ["three_bits", "two_bits_by_eight", "four_bits_by_halves"])
def test_damage_is_refused_or_read_safely(name: str) -> None:
    """For any bytes, opening or verifying fails, or all operations return."""
    data = np.fromfile(FOLDER / f"{name}.bin", np.uint8)
    for length in range(0, len(data), 61):
        with pytest.raises(_core.CorruptionError):
            _core.PackedTensor(data[:length].copy())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        bad = data.copy()
        # Half of the damage hits the headers, where sizes are.
        at = int(rng.integers(0, len(bad))) if rng.random() < 0.5 else int(rng.integers(0, 200))
        bad[at] ^= np.uint8(1 << rng.integers(0, 8))
        try:
            blob = _core.PackedTensor(bad)
        except _core.CorruptionError:
            refused += 1
            continue
        blob.dequantize()
        blob.matmul(np.ones((2, blob.shape[2]), np.float32))
        try:
            blob.verify()
        except _core.CorruptionError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("name", [case["name"] for case in CASES if sum(case["ranks"])])
@pytest.mark.parametrize("isa", _core.available_isas())
def test_products_match_the_oracle(name: str, isa: str) -> None:
    data = np.fromfile(FOLDER / f"{name}.bin", np.uint8)
    blob, weights = _core.PackedTensor(data), oracle.read(data.tobytes()).weights()
    x = np.random.default_rng(1).normal(size=(5, blob.shape[2])).astype(np.float32)
    experts = blob.shape[0]
    for expert in range(experts):
        found = blob.matmul(x, expert, "exact", isa)
        np.testing.assert_allclose(found, x.astype(np.float64) @ weights[expert].T, rtol=1e-4, atol=1e-4)
    offsets = np.linspace(0, 5, experts + 1).astype(np.int64)
    grouped = blob.matmul_grouped(x, offsets, "exact", isa)
    for expert in range(experts):
        run = slice(offsets[expert], offsets[expert + 1])
        np.testing.assert_allclose(grouped[run], blob.matmul(x[run].copy(), expert, "exact", isa), rtol=1e-6, atol=1e-6)
