"""docs/format.md suffices to read a ternary tensor: a reader written from it agrees with the core."""

from pathlib import Path

import numpy as np
import pytest

from moepack import _core
from moepack.format import PackedDirectory
from oracle import ternary_reader
from places import GOLDEN


@pytest.mark.parametrize("path", sorted((GOLDEN / "ternary").glob("*.bin")), ids=lambda path: path.name)
def test_golden_tensors(path: Path) -> None:
    data = path.read_bytes()
    codes, levels = ternary_reader.read(data)
    blob = _core.PackedTensor(np.frombuffer(data, np.uint8))
    assert np.array_equal(codes, blob.decode())
    assert np.array_equal(levels, blob.parameters("levels"))


def test_a_packed_directory(packed: Path) -> None:
    directory = PackedDirectory.open(packed)
    for name, data in directory.tensors().items():
        codes, levels = ternary_reader.read(data.tobytes())
        assert np.array_equal(codes, directory.blob(name).decode())
        assert np.array_equal(levels, directory.blob(name).parameters("levels"))


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
@pytest.mark.parametrize("p0", [0.3, 0.6, 0.8, 0.885, 0.95, 0.99])
@pytest.mark.parametrize("shape", [(2, 70, 301), (1, 3, 5000)])
def test_random_tensors(code: str, p0: float, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.choice(np.array([0, -1, 1], np.int8), shape, p=[p0, 0.7 * (1 - p0), 0.3 * (1 - p0)])
    levels = np.stack([-rng.random(shape[:2]), rng.random(shape[:2])], axis=2).astype(np.float32)
    blob = _core.encode_ternary(codes, levels, ndim=3, code=code)
    found, pairs = ternary_reader.read(blob.tobytes())
    assert np.array_equal(found, codes)
    assert np.array_equal(pairs, levels)
