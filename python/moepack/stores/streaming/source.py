"""Positional file reads that bypass the page cache if the file system supports it.

A cache on top of buffered reads would keep bytes twice, and the page cache is not part of any budget. Files are
therefore read directly, in whole pages to page-aligned memory. If direct reads are not supported or are slower on this
drive, each buffered read tells the page cache to drop its pages.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from moepack.errors import CorruptionError, LoadError
from moepack.system import reading
from moepack.system.maps import PAGE, anonymous

__all__ = ["PAGE", "READ", "Source"]

READ = 1 << 20
"""The most bytes per read: drives reach their full rate at a quarter of this with several concurrent reads."""

_PROBES = 8
"""Timed reads of each kind before one kind is chosen."""


class Source:
    """A file open for reads of whole pages.

    The descriptor refers to the opened file, even if another file takes its name later.

    Args:
        file: its path.

    Raises:
        LoadError: the file cannot be opened.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._buffered = reading.open_buffered(file)
        except OSError as error:
            raise LoadError(f"cannot be opened: {error.strerror}", file=file) from error
        self._direct = reading.open_direct(file)
        self.is_direct = self._direct is not None and self._prefers_direct()

    def read(self, into: memoryview, place: int) -> None:
        """Fill memory with the file's bytes, starting at offset `place`.

        Args:
            into: whole pages of memory.
            place: the offset of the first byte, a multiple of `PAGE`.

        Raises:
            CorruptionError: the file is too short.
            LoadError: the drive reports an error.
        """
        try:
            self._read(into, place, self.is_direct)
        except OSError as error:
            raise LoadError(f"cannot be read at byte {place}: {error.strerror}", file=self.file) from error

    def _read(self, into: memoryview, place: int, direct: bool) -> None:
        descriptor = self._direct if direct and self._direct is not None else self._buffered
        while into:
            count = reading.read_at(descriptor, into, place)
            if count == 0:
                raise self.ended(place)
            if descriptor == self._buffered:
                reading.forget(self._buffered, place, count)
            into, place = into[count:], place + count

    def ended(self, place: int) -> CorruptionError:
        """Build the error for a file that ends at byte `place`, before the requested range."""
        return CorruptionError(f"ends at byte {place}: it was truncated while it was open", file=self.file)

    def forget(self) -> None:
        """Drop the file from the page cache; mapped pages remain."""
        reading.forget(self._buffered)

    def _prefers_direct(self) -> bool:
        """Whether direct reads work and are not clearly slower than buffered ones."""
        size = os.fstat(self._buffered).st_size
        places = [size * number // (2 * _PROBES) // PAGE * PAGE for number in range(2 * _PROBES)]
        length = min(READ, size // (2 * _PROBES) // PAGE * PAGE)
        if length == 0:
            return False
        memory = memoryview(anonymous(length))
        self.forget()
        try:
            direct = _seconds(lambda place: self._read(memory, place, True), places[::2])
        except OSError:  # some file systems accept the flag but fail the read
            return False
        return direct < 1.5 * _seconds(lambda place: self._read(memory, place, False), places[1::2])

    def __del__(self) -> None:
        for descriptor in (getattr(self, "_buffered", None), getattr(self, "_direct", None)):
            if descriptor is not None:
                os.close(descriptor)


def _seconds(read: Callable[[int], None], places: list[int]) -> float:
    start = time.perf_counter()
    for place in places:
        read(place)
    return time.perf_counter() - start
