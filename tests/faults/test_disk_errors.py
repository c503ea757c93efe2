"""Disk failures (EIO) end in a `DiskError`, no partial file gets its final name, and the work can continue."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import packed_support as support
from moepack import DiskError
from moepack.export import export
from moepack.format import atomic, shard
from moepack.methods.qmoe.ternary import Ternary


@contextmanager
def failing(call: str, number: int) -> Iterator[list[int]]:
    """The `number`-th flush, rename or write of the block fails; the list then holds 0."""
    left = [number]
    places: list[Any] = [atomic, shard] if call == "write_all" else [os]
    function = getattr(places[0], call)

    def shim(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if call == "write_all":
                function(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.setattr(place, call, shim)
        yield left


def assert_fails_and_goes_on(work: Callable[[], object], call: str, number: int, out: Path) -> bool:
    """Whether the given call exists; if so, its failure is a typed error and leaves nothing at `out`."""
    with failing(call, number) as left:
        try:
            work()
        except DiskError as error:
            assert left[0] <= 0 and error.errno == errno.EIO and error.file is not None
            # The directory is flushed after the rename: then the output is complete.
            assert not out.exists() or call == "fsync"
            assert not any(atomic.is_temporary(path.name) for path in out.parent.rglob("*"))
            return True
    assert left[0] > 0, f"the failure of {call} {number} was passed over"
    return False


@pytest.mark.parametrize(
    ("call", "every", "least"), [("write_all", 5, 3), ("fsync", 3, 3), ("replace", 1, 3), ("rename", 1, 1)]
)
def test_a_job_continues_after_an_error(
    call: str, every: int, least: int, mixtral: Path, packed: Path, tmp_path: Path
) -> None:
    out, number = tmp_path / "out", 1
    while not out.exists():
        assert_fails_and_goes_on(lambda: moepack.compress(mixtral, out, method=Ternary()), call, number, out)
        number += every
    assert number > least and support.contents(out) == support.contents(packed)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("call", ["write_all", "fsync", "replace"])
def test_an_export_is_whole_or_absent(call: str, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 3):
        assert assert_fails_and_goes_on(lambda: export(packed, out), call, number, out)
    export(packed, out)
    assert list(tmp_path.iterdir()) == [out] and (out / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("call", ["write_all", "replace"])
def test_a_saved_tensor_does_not_change(call: str, tmp_path: Path) -> None:
    file = tmp_path / "tensor.safetensors"
    first, second = (moepack.GroupwiseTensor.quantize(torch.full((4, 64), value), bits=4) for value in (1.0, 2.0))
    first.save(file)
    with failing(call, 1), pytest.raises(DiskError, match="cannot write: Input/output error") as caught:
        second.save(file)
    assert caught.value.file == str(file) and list(tmp_path.iterdir()) == [file]
    assert moepack.GroupwiseTensor.load(file) == first
