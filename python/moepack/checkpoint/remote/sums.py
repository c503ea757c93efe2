"""Verifies shards that are downloaded in parts: their SHA-256 follows from the parts in the order of the file.

Parts are read while they are on disk. Parts that arrive early wait; a part that is removed before its turn counts when
it is downloaded again. Parts that no layer needs are read from the tensors that are kept apart, and what lies between
these from the Hub.

The digest is known only after the last part, when layers were already packed from the first ones. A difference is
therefore an error of the whole job (`Altered`).
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from moepack.checkpoint.remote.parts import Part, Parts
from moepack.checkpoint.remote.transfer import Listing
from moepack.errors import DownloadError
from moepack.format.atomic import disk_errors
from moepack.system.files import KEEPS_REMOVED

__all__ = ["Altered", "Sums"]

BLOCK = 1 << 20

WAIT = 0.2
"""Seconds between two looks at what another thread reads."""

Pieces = Iterator[bytes | memoryview]


class Altered(DownloadError):
    """Bytes that were already read are not those that the Hub lists. Nothing that was made of them may be kept."""


class Sums:
    """The digests of the shards that have several parts and whose SHA-256 the Hub lists. Threads may share it."""

    def __init__(self, parts: Parts, listing: Listing, pieces: Callable[[Part], Pieces | None]) -> None:
        """Start at the beginning of each shard.

        Args:
            parts: the parts.
            listing: the digests.
            pieces: returns the bytes of a part that is not downloaded; None if most of them would have to be.
        """
        names = dict.fromkeys(part.shard for part in parts.values() if not part.is_whole)
        self._parts, self._listing, self._pieces = parts, listing, pieces
        self._digests = {name: hashlib.sha256() for name in names if listing.files[name].sha256 is not None}
        self._next = dict.fromkeys(names, 0)
        self._expected: set[str] = set()
        self._waiting: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._is_reading = False
        self._open: str | None = None
        self._wrong: Altered | None = None

    def expect(self, names: Iterable[str]) -> None:
        """Announce parts that will be downloaded."""
        with self._changed:
            self._expected.update(names)

    def add(self, part: Part, path: Path) -> None:
        """Add a complete part, which `read` will read."""
        if part.shard in self._digests:
            with self._changed:
                self._waiting[part.name] = path

    def read(self) -> bool:
        """Read the parts whose turn it is. A part that cannot be read is read from its start by the next call.

        Returns:
            Whether all were read; False: another thread reads them at this time.

        Raises:
            DiskError: a part cannot be read.
            DownloadError: bytes between kept tensors cannot be downloaded.
        """
        with self._changed:
            if self._is_reading:
                return False
            self._is_reading = True
        try:
            while (found := self._take()) is not None:
                self._read(*found)
        except BaseException:
            self._stop()
            raise
        return True

    def _take(self) -> tuple[Part, Pieces] | None:
        """Return a part that comes next in its shard, and its bytes; None if there is none."""
        with self._changed:
            for shard in self._digests:
                part = self._following(shard)
                if part is None:
                    continue
                if (path := self._waiting.get(part.name)) is not None:
                    with disk_errors(path, "read"):
                        content = _blocks(path.open("rb"))  # it stays readable when it is removed
                    self._open = part.name
                    return part, content
                if part.name not in self._expected and (pieces := self._pieces(part)) is not None:
                    return part, pieces
            self._stop()
            return None

    def _following(self, shard: str) -> Part | None:
        parts = self._parts.of(shard)
        return parts[self._next[shard]] if self._next[shard] < len(parts) else None

    def _read(self, part: Part, pieces: Pieces) -> None:
        """Add the next part of a shard; compare the digest after the last one."""
        digest, listed = self._digests[part.shard].copy(), self._listing.files[part.shard].sha256
        for piece in pieces:
            digest.update(piece)
        with self._changed:
            self._digests[part.shard], self._open = digest, None
            self._next[part.shard] += 1
            self._waiting.pop(part.name, None)
            self._changed.notify_all()
        if self._following(part.shard) is None and digest.hexdigest() != listed:
            message = f"its SHA-256 is {digest.hexdigest()}, but the Hub lists {listed}"
            self._wrong = Altered(f"{message}; nothing that was packed is kept", file=part.shard)

    def _stop(self) -> None:
        with self._changed:
            self._is_reading, self._open = False, None
            self._changed.notify_all()

    def forget(self, part: Part) -> None:
        """Note that a part will be removed. Where an open file cannot be removed, wait until it is closed."""
        with self._changed:
            self._waiting.pop(part.name, None)
            while not KEEPS_REMOVED and self._open == part.name:
                self._changed.wait(WAIT)

    def check(self) -> None:
        """Raise if a shard is known to differ from the listing.

        Raises:
            Altered: a shard has another SHA-256 than listed.
        """
        if self._wrong is not None:
            raise self._wrong

    def wait(self, report: Callable[[], None] = lambda: None) -> None:
        """Wait until all parts that can be read have been read, when no more will be downloaded.

        A part that was removed before its turn is no longer expected. Raises as `read` and `check`.
        """
        with self._changed:
            self._expected.clear()
        while not self.read():
            with self._changed:
                self._changed.wait(WAIT)
            report()
        self.check()

    @property
    def unverified(self) -> list[str]:
        """The names of the shards in parts that were not read in order to the end, or have no listed SHA-256."""
        return [name for name in self._next if name not in self._digests or self._following(name) is not None]


def _blocks(stream: BinaryIO) -> Pieces:
    """Yield the content of a file, and close it."""
    with disk_errors(Path(stream.name), "read"), stream:
        while block := stream.read(BLOCK):
            yield block
