"""A golden directory stays readable. `rust/core/tests/formats/golden/directory.rs` reads the same files."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import moepack
from moepack.format import PackedDirectory
from places import GOLDEN


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("directory-v*") if path.is_dir()))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(version: str) -> Any:
    return json.loads((GOLDEN / f"{version}.json").read_text())


def test_it_is_sound(version: str) -> None:
    assert moepack.verify(GOLDEN / version).faults == ()


def test_packed_tensors_decode_to_the_written_values(version: str) -> None:
    directory = PackedDirectory.open(GOLDEN / version)
    packed = expected(version)["packed"]
    assert set(directory.tensors()) == set(packed) and packed
    for name, content in packed.items():
        blob = directory.blob(name)
        codes = np.array([["-0+".index(code) - 1 for code in row] for row in content["rows"]], np.int8)
        assert np.array_equal(blob.decode(), codes.reshape(content["shape"]))
        levels = np.array(content["levels"], np.float32)
        assert np.array_equal(blob.parameters("levels"), levels.reshape(*content["shape"][:2], 2))


def test_dense_tensors_equal_the_written_ones(version: str) -> None:
    found = {}
    for file in (GOLDEN / version).glob("*.safetensors"):
        found.update(load_file(file))
    for name, content in expected(version)["dense"].items():
        assert found[name].contiguous().view(torch.uint8).numpy().tobytes().hex() == content


def test_a_model_loads_and_runs(version: str) -> None:
    model = moepack.load(GOLDEN / version)
    logits = model(torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, 32) and bool(logits.isfinite().all())
