"""What a machine knows of a job, found by a function that travels with its code: moepack may be missing there.

Nothing of moepack is imported where this module is.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

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
    try:
        from torch.backends import cpu

        from moepack import __version__ as version

        processor = cpu.get_cpu_capability()
    except ImportError:
        return Findings(platform.node(), None, (), "")
    return Findings(platform.node(), version, _unseen(stamps), processor)


def _unseen(stamps: Mapping[str, str]) -> tuple[str, ...]:
    for path, stamp in stamps.items():
        try:
            status = os.stat(path)
        except OSError as error:
            return path, error.strerror or str(error)
        if f"{status.st_size} {status.st_mtime_ns} {status.st_ino}" != stamp:
            return path, "is another file there"
    return ()
