"""Side files: the small files of a model directory beside its weights, and which of them may change once it is packed.

What people read, and how prompts are written and answers drawn, is their affair: a packed directory may gain a model
card, or have its chat template edited. Weights, configuration, index and vocabulary stay as they were packed.
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["SideFile", "is_editable", "is_small", "may_hold_weights"]

EDITABLE = ("*.md", "*.jinja", "generation_config.json", "tokenizer_config.json", "LICENSE*", "NOTICE*")
"""Files that may differ from what the manifest says of them, or be missing."""

LARGEST = 64 << 20
"""Largest side file in bytes."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".index.json")


@dataclass(frozen=True)
class SideFile:
    """A side file that is not as it was packed.

    Attributes:
        file: its name, inside the directory.
        change: "added", "changed" or "missing".
    """

    file: str
    change: str

    def __str__(self) -> str:
        return f"{self.file} ({self.change})"


def may_hold_weights(name: str) -> bool:
    """Say whether a file's name ends as names of weights do, or of indices that say where weights are."""
    return name.endswith(_WEIGHTS)


def is_small(file: Path) -> bool:
    """Say whether a file is a side file: a small one without weights."""
    return file.is_file() and not may_hold_weights(file.name) and file.stat().st_size <= LARGEST


def is_editable(name: str) -> bool:
    """Say whether a file may differ from what the manifest says of it."""
    return any(fnmatch(name, pattern) for pattern in EDITABLE)
