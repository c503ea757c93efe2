"""A file of the Hub as a stream whose bytes are read by ranges, for readers that seek."""

import io

from moepack.checkpoint.remote.transfer import Transfer

__all__ = ["RangedFile"]

BLOCK = 64 << 10
"""Bytes of a request. Blocks are kept, because headers are read in small pieces."""


class RangedFile(io.RawIOBase):
    """A file of a listing. Not for threads to share."""

    def __init__(self, transfer: Transfer, name: str) -> None:
        super().__init__()
        self._transfer, self._name, self._position = transfer, name, 0
        self._size = transfer.listing.files[name].size
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at most one block; raises as `Transfer.read`."""
        number, first = divmod(self._position, BLOCK)
        if self._position >= self._size:
            return 0
        if number not in self._blocks:
            start = number * BLOCK
            self._blocks[number] = self._transfer.read(self._name, start, min(start + BLOCK, self._size))
        found = self._blocks[number][first : first + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
