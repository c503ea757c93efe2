"""Inspects a machine for a job. The function is sent with its code, because moepack may be missing on the machine.

This module must not import moepack.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["Findings", "look"]


class Findings(NamedTuple):
    """Findings on one machine.

    Attributes:
        host: its name.
        version: moepack's version; None if moepack is missing or fails to import.
        unseen: the first file that is missing or different, and why; empty if all files match.
        processor: the instruction set that torch uses.
    """

    host: str
    version: str | None
    unseen: tuple[str, ...]
    processor: str


def look(stamps: Mapping[str, str]) -> Findings:
    """Inspect this machine; `stamps` holds size, modification time and inode of files, by path."""
    version = _attribute("moepack", "__version__")
    # Torch loads moepack as a plugin, which may fail with another version.
    capability = _attribute("torch.backends.cpu", "get_cpu_capability")
    return Findings(platform.node(), version, _unseen(stamps), capability() if capability else "")


def _attribute(module: str, name: str) -> Any:
    """Return an attribute of a module; None if the module fails to import for any reason."""
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
            return path, "is a different file there"
    return ()
