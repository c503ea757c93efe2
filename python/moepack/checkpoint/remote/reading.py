"""Files of the Hub whose bytes are read by ranges as a parser asks for them."""

import io

from moepack.checkpoint.remote.transfer import Transfer

__all__ = ["Front", "RangedFile"]

BLOCK = 64 << 10
"""Bytes of a request. Blocks are kept, because headers are read in small pieces."""

FIRST = 1 << 20
"""Bytes of the first request for a header of unknown length. Each further request doubles what is known."""


class RangedFile(io.RawIOBase):
    """A file of a listing as a stream. Not for threads to share."""

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


class Front:
    """The bytes at the front of a file, requested in growing ranges, for a parser that does not know where they end."""

    def __init__(self, transfer: Transfer, name: str) -> None:
        self._transfer, self._name = transfer, name
        self._size = transfer.listing.files[name].size
        self._data = bytearray()

    def __getitem__(self, place: slice) -> bytes:
        """Return the bytes of a slice; raises as `Transfer.read`."""
        if place.stop > len(self._data):
            stop = min(max(place.stop, FIRST, 2 * len(self._data)), self._size)
            self._data += self._transfer.read(self._name, len(self._data), stop)
        return bytes(self._data[place])
