"""Memory maps of files (read-only) and of anonymous memory, in huge pages if possible.

Decoding reads experts at scattered places of a large map, which is slower with pages of 4 KB (`docs/performance.md`).
Linux uses advice (`madvise`): anonymous memory advised huge gets huge pages if
`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or `always`. A file advised huge and random is read in pieces
of 2 MB, which become huge pages if its file system keeps large folios (XFS, ext4 since Linux 6.16). Data already in the
page cache keep their pages. Without support for this advice, nothing changes.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.system import maps

__all__ = ["map_file", "own_memory"]

Bytes = npt.NDArray[np.uint8]


def map_file(path: Path, *, huge: bool = True) -> Bytes:
    """Map a whole file read-only. The array keeps the map alive.

    Args:
        path: the file.
        huge: request huge pages. Page faults then read 2 MB, which is wasteful if memory is too small to keep them
            until they are used.

    Raises:
        OSError: the file cannot be opened or mapped.
        ValueError: the file is empty.
    """
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if huge and maps.advise_huge(mapping):
        maps.advise_scattered(mapping)
    return np.frombuffer(mapping, np.uint8)


def own_memory(size: int) -> Bytes:
    """Reserve `size` bytes of private zeroed memory. Pages are allocated when they are written.

    Raises:
        OSError: the system cannot reserve the memory.
    """
    memory = maps.anonymous(max(size, 1))
    maps.advise_huge(memory)
    return np.frombuffer(memory, np.uint8, count=size)
