"""Helpers for fault tests: checkpoints with a fault, and the required form of a rejection."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
from moepack import MoepackError
from moepack.methods import METHODS, Method, create

WEIGHTS = "model.safetensors"

Tensors = dict[str, torch.Tensor]


def faulty(
    model: Path, place: Path, config: Mapping[str, Any] | None = None, change: Callable[[Tensors], object] | None = None
) -> Path:
    """A copy of a checkpoint in `place`/model, with changed entries in config.json or changed tensors."""
    directory = Path(shutil.copytree(model, place / "model"))
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **(config or {})}))
    if change is not None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return directory


def every_method(place: Path) -> dict[str, Method]:
    """Each method by name, and `finequant` with a text as well; those that calibrate read a text in `place`."""
    text = place / "text.txt"
    text.write_text("".join(f"Line {i} of a text that nobody wrote.\n" for i in range(200)))
    seen = {"calibration": str(text), "samples": 4, "sequence_length": 32}
    settings = {name: seen for name in ("codequant", "floe", "qmoe")}
    settings |= {"auto": {**seen, "bits_per_weight": 6.0}, "rate": {"bits_per_weight": 2.5, "calibration": "none"}}
    settings |= {"finequant": {"calibration": "none"}}
    found = {name: create(name, **settings.get(name, {})) for name in METHODS}
    found["finequant with a text"] = create("finequant", bits=3, **seen)
    found["finequant with codebooks"] = create("finequant", grid="codebook", **seen)
    return found


@contextmanager
def refused(
    error: type[MoepackError], message: str, file: Path | None = None, tensor: str | None = None
) -> Iterator[None]:
    """The block must raise exactly `error`, naming file and tensor where they are given."""
    with pytest.raises(error, match=message) as caught:
        yield
    assert type(caught.value) is error
    assert file is None or caught.value.file == str(file)
    assert tensor is None or caught.value.tensor == tensor


def assert_refused_by_every_method(
    model: Path,
    place: Path,
    error: type[MoepackError],
    message: str,
    file: Path | None = None,
    tensor: str | None = None,
) -> None:
    """Every method rejects a model with the same error and leaves no files."""
    work = place / "work"
    work.mkdir()
    for method in every_method(place).values():
        with refused(error, message, file, tensor):
            moepack.compress(model, work / "out", method=method)
        assert not any(work.iterdir()), method.name
