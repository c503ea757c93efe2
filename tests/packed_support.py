"""Small helpers for tests that inspect or modify packed directories."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from moepack import _core
from moepack.backends.speeds import Speeds
from moepack.format import MANIFEST, FileRecord, Manifest
from moepack.pipeline.journal import Workspace

FAST = Speeds("fast", {**dict.fromkeys(("int2", "int3", "int4", "int8"), 5e9), "coded2": 1e9, "coded4": 1e9}, 1e12)
"""Speeds of a machine whose products of fixed widths are five times as fast as those of coded integers."""


def calibration_text(file: Path) -> Path:
    """Write a text for calibration; return its file."""
    file.write_text("".join(f"Line {i} of a text that nobody wrote, {i * i} words long.\n" for i in range(200)))
    return file


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory by name, including those in folders."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with open(file, "r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def interrupted(packer: type, call: int) -> Iterator[None]:
    """Expect the user to interrupt a job at a call of a packer's `solve`."""
    solve, calls = packer.solve, []

    def interrupting(self: Any, stage: Any) -> Any:
        calls.append(stage)
        if len(calls) == call:
            raise KeyboardInterrupt
        return solve(self, stage)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packer, "solve", interrupting)
        yield


@contextmanager
def stopping_after_each_shard() -> Iterator[None]:
    """Let the user interrupt every job once it has written a shard."""
    append = Workspace.append

    def stopping(self: Workspace, shard: Any) -> None:
        append(self, shard)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "append", stopping)
        yield


def assert_same_bytes(source: Path, place: Path, method: Callable[[], Any], call: int) -> None:
    """The bytes of a job depend neither on its threads nor on an interruption at a call of the method's `solve`."""
    torch_threads, core_threads = torch.get_num_threads(), _core.threads()
    try:
        moepack.compress(source, place / "one", method=method(), threads=1)
        moepack.compress(source, place / "four", method=method(), threads=4)
    finally:
        torch.set_num_threads(torch_threads)
        _core.set_threads(core_threads)
    assert contents(place / "one") == contents(place / "four")
    with interrupted(type(method()), call):
        moepack.compress(source, place / "again", method=method())
    assert moepack.compress(source, place / "again", method=method()).resumed_weights > 0
    assert contents(place / "one") == contents(place / "again")


def rewrite_manifest(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's content and update its checksum, like a faulty or hostile writer."""
    from moepack.format import manifest as module

    content = json.loads((directory / MANIFEST).read_bytes())
    del content["checksum"]
    change(content)
    (directory / MANIFEST).write_bytes(module._canonical(content))


def accept_file(directory: Path, name: str) -> None:
    """Record a changed file's size and hash in the manifest, so that only its content can reveal the change."""
    record = FileRecord.of((directory / name).read_bytes())
    entry = {"size": record.size, "sha256": record.sha256}
    rewrite_manifest(directory, lambda content: content["files"].__setitem__(name, entry))


def manifest_of(directory: Path) -> Manifest:
    """Parse a directory's manifest."""
    return Manifest.parse((directory / MANIFEST).read_bytes(), directory / MANIFEST)
