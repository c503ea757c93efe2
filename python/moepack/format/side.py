"""Side files: the files of a model directory besides its weights, and which of them may change after packing.

Tokenizers and processors save many files, some in folders, under names that differ between models and releases. The
rule therefore lists no names: every small file without weights belongs to the model and is copied with it. A folder
belongs to it completely or not at all: a folder with weights is another model (`original/`, `onnx/`,
`checkpoint-500/`).

Documentation, prompt templates and sampling settings may be edited: a packed directory may gain a model card, or have
its chat template changed. Weights, configuration, index and vocabulary must not change.

Invariant: the name of a side file is its path below the directory, with `/` between folders.
"""

import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from moepack.format.regular import leads_out
from moepack.system.names import is_usable

__all__ = ["SideFile", "files_below", "is_editable", "is_safe_name", "is_small", "may_hold_weights", "side_names"]

EDITABLE = ("*.md", "*.jinja", "generation_config.json", "tokenizer_config.json", "LICENSE*", "NOTICE*")
"""Files that may differ from the manifest or be missing."""

RECIPE = "recipe.yaml"
"""How `compress` made the directory. The manifest does not list it, so it may be edited."""

LARGEST = 64 << 20
"""Largest side file, and largest folder of side files, in bytes."""

MOST = 1000
"""Maximum number of files in a folder of side files."""

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"),
    ".index.json",
)

_DEBRIS = (".incomplete", ".lock")
"""Suffixes of temporary files that downloads leave behind."""


@dataclass(frozen=True)
class SideFile:
    """A side file that changed after packing.

    Attributes:
        file: name of the file, relative to the directory.
        change: "added", "changed" or "missing".
    """

    file: str
    change: str

    def __str__(self) -> str:
        return f"{self.file} ({self.change})"


def may_hold_weights(name: str) -> bool:
    """Return whether a file has the suffix of a weight file or of an index of weights."""
    return name.endswith(_WEIGHTS)


def is_small(file: Path) -> bool:
    """Return whether a file is small and holds no weights."""
    return file.is_file() and not may_hold_weights(file.name) and file.stat().st_size <= LARGEST


def is_editable(name: str) -> bool:
    """Return whether a file may differ from the manifest."""
    return any(fnmatch(name, pattern) for pattern in EDITABLE)


def is_safe_name(name: str) -> bool:
    """Return whether a name stays inside the directory: plain folder and file names, separated by `/`.

    On Windows, names that the system reads differently, such as those of devices, do not.
    """
    plain = not set(name) & set("\\\0") and all(part not in ("", ".", "..") for part in name.split("/"))
    return plain and is_usable(name)


def side_names(entry: Path) -> list[str]:
    """Return the names of the side files in an entry (file or folder) of a model directory; empty if there are none.

    Temporary files of downloads, hidden files and compiled Python files are skipped.

    Raises:
        OSError: a folder cannot be listed.
    """
    if entry.is_symlink() and entry.is_dir():
        return []
    if not entry.is_dir():
        sound = is_small(entry) and is_safe_name(entry.name) and not entry.name.endswith(_DEBRIS)
        return [entry.name] if sound else []
    names = files_below(entry)
    files = [entry.parent / name for name in names]
    sound = len(files) <= MOST and all(is_safe_name(name) for name in names)
    if not sound or any(leads_out(file, entry.parent) or not is_small(file) for file in files):
        return []
    return names if sum(file.stat().st_size for file in files) <= LARGEST else []


def files_below(folder: Path) -> list[str]:
    """Return the names of all files in a folder of a model directory, sorted. Links to folders are not followed.

    Raises:
        OSError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    found: list[str] = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = [name for name in folders if not _is_passed_over(name) and name not in links]
        names = (name for name in (*files, *links) if not _is_passed_over(name))
        found += [(Path(place) / name).relative_to(folder.parent).as_posix() for name in names]
    return sorted(found)


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name.endswith(_DEBRIS) or name == "__pycache__"
