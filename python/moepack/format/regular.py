"""Opens untrusted files safely: only regular files, and JSON only up to a size limit.

A name may refer to a pipe, which blocks the reader, an endless device, a sparse file larger than memory, or a link to a
file outside the model.
"""

import errno
import json
import os
import stat
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any

from moepack.errors import CheckpointError, MoepackError
from moepack.system.files import open_descriptor

__all__ = ["IS_POINTER", "MAX_JSON", "is_pointer", "leads_out", "open_regular", "parse_json", "read_json"]

MAX_JSON = 256 << 20
"""Largest accepted JSON file in bytes. The index of a model with 10^6 tensors takes about half of it."""

IS_POINTER = "is a Git LFS pointer, not the file itself; `git lfs pull` downloads the file"
"""Error message for a git-lfs pointer file."""

_POINTER = b"version https://git-lfs"
"""First bytes of a git-lfs pointer file."""


def open_regular(file: str | PathLike[str]) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device or a directory.
    """
    descriptor = open_descriptor(file)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def is_pointer(file: Path) -> bool:
    """Return whether a file is a git-lfs pointer.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(file) as stream:
        return stream.read(len(_POINTER)) == _POINTER


def leads_out(file: Path, root: Path | None = None) -> bool:
    """Return whether a file is a link that leaves its model's directory.

    Links of a snapshot in the Hub's cache, `models--NAME/snapshots/REVISION/FILE`, to `models--NAME/blobs` do not.

    Args:
        file: the file.
        root: the model's directory; None means the file's directory.
    """
    if not file.is_symlink():
        return False
    target, directory = file.resolve(), (root or file.parent).resolve()
    inside = [directory]
    if directory.parent.name == "snapshots":
        inside.append(directory.parent.parent / "blobs")
    return not any(target.is_relative_to(place) for place in inside)


def read_json(file: Path, error: type[MoepackError]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        error: the file is missing, unreadable, not a regular file, larger than `MAX_JSON`, or not a JSON object.
    """
    try:
        with open_regular(file) as stream:
            raw = stream.read(MAX_JSON + 1)
    except FileNotFoundError as cause:
        raise error("does not exist", file=file) from cause
    except OSError as cause:
        raise error(f"cannot be read: {cause.strerror or cause}", file=file) from cause
    if len(raw) > MAX_JSON:
        raise error(f"longer than {MAX_JSON} bytes", file=file)
    return parse_json(raw, file, error)


def parse_json(raw: bytes, file: Path, error: type[MoepackError] = CheckpointError) -> dict[str, Any]:
    """Parse `raw` as one JSON object without duplicate keys. Errors name `file`.

    Raises:
        error: the bytes are not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"the JSON holds '{twice}' twice", file=file)
        return fields

    if raw.startswith(_POINTER):
        raise error(IS_POINTER, file=file)
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as cause:
        raise error(f"not valid JSON: {cause}", file=file) from cause
    if not isinstance(fields, dict):
        raise error(f"expected a JSON object, found {type(fields).__name__}", file=file)
    return fields
