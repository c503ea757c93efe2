"""Positional reads of a file, past the page cache where the file system lets them.

A cache of our own beside buffered reads would keep bytes twice, and what the page cache takes is nobody's budget. So
files are read through O_DIRECT, whole pages into whole pages; where that is refused, or slower on this drive, each
buffered read tells the page cache to drop what it has read.
"""

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moepack.errors import CorruptionError, LoadError

__all__ = ["PAGE", "READ", "Source"]

PAGE = mmap.PAGESIZE
"""Bytes of a page; places, lengths and memory of direct reads are multiples."""

READ = 1 << 20
"""Most bytes of a read: drives reach their full rate at a quarter of this, with several reads at a time."""

_PROBES = 8
"""Reads of each kind that are timed before one is chosen."""


class Source:
    """A file that is open for reads of whole pages.

    The descriptor keeps the file that was opened, whatever takes its name later.

    Args:
        file: its path.

    Raises:
        LoadError: it cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._buffered = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"cannot be opened: {error.strerror}", file=file) from error
        self._direct = _open_direct(file)
        self.is_direct = self._direct is not None and self._prefers_direct()

    def read(self, into: memoryview, place: int) -> None:
        """Fill memory with the file's bytes from `place` on.

        Args:
            into: whole pages of memory.
            place: of the first byte, a multiple of `PAGE`.

        Raises:
            CorruptionError: the file ends before.
            LoadError: the drive reports an error.
        """
        try:
            self._read(into, place, self.is_direct)
        except OSError as error:
            raise LoadError(f"cannot be read at byte {place}: {error.strerror}", file=self.file) from error

    def _read(self, into: memoryview, place: int, direct: bool) -> None:
        descriptor = self._direct if direct and self._direct is not None else self._buffered
        while into:
            count = os.preadv(descriptor, [into], place)
            if count == 0:
                raise self.ended(place)
            if descriptor == self._buffered:
                self._forget(place, count)
            into, place = into[count:], place + count

    def ended(self, place: int) -> CorruptionError:
        """The error of a file that ends at a byte before what is read."""
        return CorruptionError(f"ends at byte {place}: it was truncated while it was open", file=self.file)

    def _forget(self, place: int, count: int) -> None:
        """Let the page cache drop some bytes."""
        with suppress(OSError, AttributeError):
            os.posix_fadvise(self._buffered, place, count, os.POSIX_FADV_DONTNEED)

    def forget(self) -> None:
        """Let the page cache drop the file; pages that somebody has mapped stay."""
        self._forget(0, 0)

    def _prefers_direct(self) -> bool:
        """Whether direct reads work here and are not clearly slower than buffered ones."""
        size = os.fstat(self._buffered).st_size
        places = [size * number // (2 * _PROBES) // PAGE * PAGE for number in range(2 * _PROBES)]
        length = min(READ, size // (2 * _PROBES) // PAGE * PAGE)
        if length == 0:
            return False
        memory = memoryview(mmap.mmap(-1, length))
        self.forget()
        try:
            direct = _seconds(lambda place: self._read(memory, place, True), places[::2])
        except OSError:  # file systems that accept the flag and refuse the read
            return False
        return direct < 1.5 * _seconds(lambda place: self._read(memory, place, False), places[1::2])

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_buffered", None), getattr(self, "_direct", None)):
            if descriptor is not None:
                os.close(descriptor)


def _open_direct(file: Path) -> int | None:
    """A descriptor for direct reads, or None."""
    with suppress(OSError, AttributeError):
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    return None


def _seconds(read: Callable[[int], None], places: list[int]) -> float:
    start = time.perf_counter()
    for place in places:
        read(place)
    return time.perf_counter() - start
