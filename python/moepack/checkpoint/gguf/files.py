"""Finds GGUF files: which files of a directory or repository are a model, and the parts of a split one."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from moepack.errors import CheckpointError
from moepack.format.weights import pickle_files, weight_files

__all__ = ["MAGIC", "SUFFIX", "gguf_files", "gguf_models", "is_gguf", "is_kind", "parts_of"]

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""The first bytes of a file."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = ("mmproj", "imatrix")
"""Beginnings of the names of files that hold an image encoder or importances."""


def is_gguf(file: Path) -> bool:
    """Return whether a file is named as GGUF or, as in the stores of some programs, has another name and its magic."""
    if file.suffix == SUFFIX or not file.is_file():
        return file.suffix == SUFFIX
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_files(directory: Path) -> list[Path]:
    """Return the parts of the GGUF model in a directory; empty if there is none, or if it has other weights.

    Raises:
        CheckpointError: there are several models, or a part is missing.
    """
    if not directory.is_dir():
        return []
    found = sorted(file for file in directory.glob(f"*{SUFFIX}") if not file.name.startswith(_NO_MODEL))
    if not found or weight_files(directory) or pickle_files(directory):
        return []
    parts = parts_of(found[0])
    if others := [file.name for file in found if file not in parts]:
        names = ", ".join([found[0].name, *others][:4])
        raise CheckpointError(f"holds several GGUF models ({names}); give one of the files", file=directory)
    return parts


def parts_of(file: Path) -> list[Path]:
    """Return all parts of a split model in order, from any of them; the file itself if it is not split.

    Raises:
        CheckpointError: a part is missing.
    """
    parts = [file.with_name(name) for name in _part_names(file.name)]
    if missing := [part for part in parts if not part.exists()]:
        raise CheckpointError(f"is a part of a split model, and {missing[0].name} does not exist", file=file)
    return parts


def gguf_models(names: Iterable[str]) -> Sequence[Sequence[str]]:
    """Return the GGUF models among the files of a repository: the names of the parts of each, in order.

    A split model counts if its first part exists. Other parts may be missing.
    """
    found = sorted(name for name in names if name.endswith(SUFFIX))
    models = []
    for name in found:
        folder, _, file = name.rpartition("/")
        parts = _part_names(file)
        if file == parts[0] and not file.startswith(_NO_MODEL):
            models.append([f"{folder}/{part}" if folder else part for part in parts])
    return models


def is_kind(name: str, kind: str) -> bool:
    """Return whether the path of a file names a quantization, such as `Q8_0` in `model-Q8_0.gguf` or `Q8_0/model.gguf`.

    Case does not matter.
    """
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(kind)}(?![A-Za-z0-9_])", name, re.ASCII | re.IGNORECASE) is not None


def _part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model in order, from that of any part; `name` if it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
