"""Memory maps: a file's bytes read-only, and memory of the process's own, both in huge pages where that can be had.

Decoding reads experts here and there in a large map, which costs more in pages of 4 KB (`docs/performance.md`).
Linux decides by advice (`madvise`): own memory advised huge gets such pages if
`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or `always`. A file advised huge and random is read in
pieces of 2 MB, and where its file system keeps large folios (XFS, ext4 since Linux 6.16) those become huge pages; what
the page cache holds already stays in the pages it has. Where there is no such advice nothing is lost.
"""

import mmap
import platform
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["map_file", "own_memory"]

Bytes = npt.NDArray[np.uint8]


def map_file(path: Path, *, huge: bool = True) -> Bytes:
    """Map a whole file, read-only; the array keeps the map.

    Args:
        path: the file.
        huge: ask for huge pages. What is missed is then read in pieces of 2 MB, a waste where memory is too short to
            keep them until the rest of their experts is used.

    Raises:
        OSError: the file cannot be opened or mapped.
        ValueError: it is empty.
    """
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if huge and _advise_huge(mapping) and _reads_huge_pages():
        mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, np.uint8)


def own_memory(size: int) -> Bytes:
    """Reserve private zeroed memory of `size` bytes, which takes pages as they are written.

    Raises:
        OSError: the system refuses.
    """
    memory = mmap.mmap(-1, max(size, 1), access=mmap.ACCESS_COPY)
    _advise_huge(memory)
    return np.frombuffer(memory, np.uint8, count=size)


def _advise_huge(memory: mmap.mmap) -> bool:
    """Ask for huge pages; whether the system knows them."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        return True
    return False


def _reads_huge_pages() -> bool:
    """Whether a miss in a map advised huge reads 2 MB: Linux 5.18. Older ones, advised random, would read 4 KB."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 18)
