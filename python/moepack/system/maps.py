"""Memory maps, and advice on them.

Linux backs maps with huge pages on request (`madvise`). macOS and Windows have no such advice for ordinary processes.
"""

import ctypes
import mmap
import platform
import re
import sys
import weakref
from contextlib import suppress
from typing import Any

__all__ = ["PAGE", "Reserved", "advise_huge", "advise_scattered", "anonymous"]

PAGE = mmap.PAGESIZE
"""The page size in bytes."""


if sys.platform == "win32":
    from moepack.system.kernel32 import checked, function

    _RESERVE_COMMIT, _READ_WRITE, _RELEASE = 0x3000, 4, 0x8000

    def _anonymous(size: int) -> Any:
        return mmap.mmap(-1, size)

    def _reserve(size: int) -> Any:
        # All pages are committed, because a kernel may read past the bytes of an expert. Only touched ones take memory.
        address = checked(function("VirtualAlloc")(None, size, _RESERVE_COMMIT, _READ_WRITE))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, function("VirtualFree"), address, 0, _RELEASE)
        return memory

    def _release(memory: Any, start: int, count: int) -> None:
        function("DiscardVirtualMemory")(ctypes.addressof(memory) + start, count)

    def _advise_huge(memory: mmap.mmap) -> bool:
        return False

    def _advise_scattered(memory: mmap.mmap) -> None:
        pass

elif sys.platform == "darwin":
    _NORESERVE, _FREE_REUSABLE = 0x40, 7  # of Darwin, not defined by Python

    def _anonymous(size: int) -> Any:
        return mmap.mmap(-1, size, access=mmap.ACCESS_COPY)

    def _reserve(size: int) -> Any:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)

    def _release(memory: Any, start: int, count: int) -> None:
        memory.madvise(_FREE_REUSABLE, start, count)  # MADV_DONTNEED would keep the pages

    def _advise_huge(memory: mmap.mmap) -> bool:
        return False

    def _advise_scattered(memory: mmap.mmap) -> None:
        pass

else:
    _NORESERVE = 0x4000  # of Linux, not defined by Python

    def _anonymous(size: int) -> Any:
        return mmap.mmap(-1, size, access=mmap.ACCESS_COPY)

    def _reserve(size: int) -> Any:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would load bytes of its neighbors
        return memory

    def _release(memory: Any, start: int, count: int) -> None:
        memory.madvise(mmap.MADV_DONTNEED, start, count)

    def _advise_huge(memory: mmap.mmap) -> bool:
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
            return True
        return False

    def _advise_scattered(memory: mmap.mmap) -> None:
        if _reads_huge_pages():
            memory.madvise(mmap.MADV_RANDOM)

    def _reads_huge_pages() -> bool:
        """Whether a fault in a map advised huge reads 2 MB (Linux 5.18). Older kernels would read 4 KB."""
        version = re.match(r"(\d+)\.(\d+)", platform.release())
        return version is not None and (int(version[1]), int(version[2])) >= (5, 18)


class Reserved:
    """A private address range that may exceed the memory: a page takes memory from its first write to `release`.

    Windows also counts the whole range against memory and paging file.

    Args:
        size: whole pages, in bytes.

    Raises:
        OSError: the system cannot reserve the range.

    Attributes:
        memory: the bytes, as an object with the buffer protocol; zero at first. The range lives as long as it.
    """

    def __init__(self, size: int) -> None:
        self.memory = _reserve(size)
        self.size = size

    def release(self, start: int, count: int) -> None:
        """Release the memory of whole pages. Their bytes become zero on Linux, and arbitrary elsewhere."""
        _release(self.memory, start, count)


def anonymous(size: int) -> Any:
    """Map `size` bytes of zeroed memory, which is allocated when it is written. Raises `OSError`."""
    return _anonymous(size)


def advise_huge(memory: mmap.mmap) -> bool:
    """Request huge pages; return whether the system supports the request."""
    return _advise_huge(memory)


def advise_scattered(memory: mmap.mmap) -> None:
    """Announce reads at scattered places of a map advised huge, so that no more than a huge page is read at a time."""
    _advise_scattered(memory)
