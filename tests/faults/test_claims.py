"""Tensors of a few bytes that claim to be large, new or of another dictionary are rejected on opening."""

import time
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from moepack import CorruptionError, _core
from moepack.registry import open_tensor
from places import GOLDEN

BLOBS = {
    f"{file.parent.name}/{file.name}": np.frombuffer(file.read_bytes(), np.uint8)
    for file in sorted(GOLDEN.rglob("*"))
    if file.suffix == ".bin" and file.read_bytes()[:4] == b"MOEP"
}
SHAPE = {
    b"MOEPTERN": 24,
    b"MOEPGRPW": 16,
    b"MOEPCODE": 16,
    b"MOEPRANS": 16,
    b"MOEPCOMP": 144,
    b"MOEPCHNL": 16,
}
"""Offsets of experts, rows and columns in a tensor of each format; a compensated one begins with a group-wise one."""

LARGE = (1 << 40, (1 << 31) - 1, (1 << 63) - 1, (1 << 64) - 1)


def changed(blob: NDArray[np.uint8], place: int, values: list[int]) -> NDArray[np.uint8]:
    copy = blob.copy()
    copy[place : place + 8 * len(values)] = np.array(values, np.uint64).view(np.uint8)
    return copy


def test_every_format_has_a_golden_tensor() -> None:
    assert {bytes(magic) for _, magic, _ in _core.formats()} == set(SHAPE)
    assert {blob[:8].tobytes() for blob in BLOBS.values()} == set(SHAPE)


@pytest.mark.parametrize("name", BLOBS)
def test_sizes_that_the_bytes_cannot_hold_are_refused_at_once(name: str) -> None:
    blob, start = BLOBS[name], time.monotonic()
    place = SHAPE[blob[:8].tobytes()]
    sizes = blob[place : place + 24].view(np.uint64).tolist()
    for axis in range(3):
        for large in LARGE:
            claim = [large if i == axis else size for i, size in enumerate(sizes)]
            # Without experts, any number of rows is valid: nothing is stored or computed.
            with suppress(CorruptionError) if claim[0] == 0 else pytest.raises(CorruptionError):
                open_tensor(changed(blob, place, claim), file="x", tensor="y").verify()
    with pytest.raises(CorruptionError):
        open_tensor(changed(blob, place, [1 << 20, 1 << 20, 0]), file="x", tensor="y").verify()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", BLOBS)
def test_newer_versions_are_refused_by_name(name: str) -> None:
    blob = BLOBS[name].copy()
    blob[8:10] = (99, 0)
    with pytest.raises(CorruptionError, match=r"x: tensor 'y': .*version 99"):
        open_tensor(blob, file="x", tensor="y")


@pytest.mark.parametrize("name", [name for name in BLOBS if "fsv8" in name])
def test_dictionaries_that_do_not_exist_are_refused(name: str) -> None:
    blob = BLOBS[name].copy()
    blob[14] = 36
    with pytest.raises(CorruptionError, match="dictionar"):
        open_tensor(blob, file="x", tensor="y")


@pytest.mark.parametrize("name", BLOBS)
def test_every_truncation_and_extension_is_refused(name: str) -> None:
    blob = BLOBS[name]
    steps = {*range(min(len(blob), 300)), *range(0, len(blob), 61), len(blob) - 1}
    for length in sorted(steps):
        with pytest.raises(CorruptionError, match=r"x: tensor 'y'"):
            open_tensor(blob[:length].copy(), file="x", tensor="y")
    with pytest.raises(CorruptionError):
        open_tensor(np.concatenate([blob, np.zeros(64, np.uint8)]), file="x", tensor="y")
