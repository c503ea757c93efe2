"""Small helpers for tests that inspect or modify packed directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moepack.format import MANIFEST, FileRecord, Manifest


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
