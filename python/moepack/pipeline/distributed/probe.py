"""What a machine knows of a job, found by a function that travels with its code: moepack may be missing there.

Nothing of moepack is imported where this module is.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["Findings", "look"]


class Findings(NamedTuple):
    """What was found on a machine.

    Attributes:
        host: its name.
        version: of moepack; None where it is missing or does not load.
        unseen: the first file that is not there or is another one, and why; empty where all are seen.
        processor: the instructions that torch uses.
    """

    host: str
    version: str | None
    unseen: tuple[str, ...]
    processor: str


def look(stamps: Mapping[str, str]) -> Findings:
    """Look at this machine; `stamps` are size, time of the last write and inode of files, by their paths."""
    version = _attribute("moepack", "__version__")
    # Torch loads moepack as a plugin: with another version that may fail.
    capability = _attribute("torch.backends.cpu", "get_cpu_capability")
    return Findings(platform.node(), version, _unseen(stamps), capability() if capability else "")


def _attribute(module: str, name: str) -> Any:
    """What a module has under a name; None where it does not load, for whatever reason."""
    try:
        return getattr(import_module(module), name)
    except Exception:
        return None


def _unseen(stamps: Mapping[str, str]) -> tuple[str, ...]:
    for path, stamp in stamps.items():
        try:
            status = os.stat(path)
        except OSError as error:
            return path, error.strerror or str(error)
        if f"{status.st_size} {status.st_mtime_ns} {status.st_ino}" != stamp:
            return path, "is another file there"
    return ()
