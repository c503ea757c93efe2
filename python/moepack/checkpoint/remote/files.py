"""The shards of a model on the Hub, downloaded ahead of their readers into little disk space.

Before `expect`, tensors are read by ranges; those announced by `gather` are kept, because they are needed again at the
end. After `expect`, threads download shards, or parts of large ones (`parts`), in the order in which layers need them,
several at a time, and those that were read are removed when the next ones need their space. Readers wait for missing
parts. A part that was removed too early is downloaded again.

Invariants:

* downloaded parts, started ones included, take at most the budget;
* only shards with the size, header and SHA-256 of the listing are read; those in several parts are verified when the
  last part is there (`sums`);
* after a kill at any time, a new object over the same folder and commit continues with what the folder holds.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moepack.checkpoint.gguf.files import SUFFIX
from moepack.checkpoint.gguf.header import read_gguf
from moepack.checkpoint.pickles import read_pickle
from moepack.checkpoint.remote.kept import KeptTensors, at_once, surviving
from moepack.checkpoint.remote.parts import Part, Parts
from moepack.checkpoint.remote.ranges import RangeFiles
from moepack.checkpoint.remote.sums import Sums
from moepack.checkpoint.remote.transfer import STOPPED, Listing, Transfer
from moepack.checkpoint.resolve import hub_reason
from moepack.checkpoint.shards import SAMPLE_BYTES, Bytes, ShardFiles, map_range, sample_positions, sampled
from moepack.errors import CheckpointError, DiskError, DownloadError, MoepackError, ResumeError
from moepack.format.atomic import disk_errors
from moepack.format.header import Header, TensorInfo, read_header
from moepack.system.files import remove, remove_tree, replace
from moepack.system.locks import Lock, lock_directory, unlock

__all__ = ["RemoteFiles", "Traffic"]

AT_ONCE = 3
"""Parts that are downloaded at the same time, and the default budget in parts."""

COMPARED = 1 << 23
"""Bytes of two tensors that are compared at a time."""

ALONE = 4
"""A part is downloaded again once more than a quarter of it was read by ranges."""

LARGEST_ALONE = 64 << 20
"""Largest tensor in bytes that is read by its range instead of its part."""

LARGEST_REST = 64 << 20
"""Most bytes of a part that no layer needs that are read only to verify its shard."""

WAIT = 0.2
"""Seconds between two reports of a reader that waits."""

Run = tuple[int, int, TensorInfo | None]
"""First byte of a range, the byte after its last one, and the kept tensor there, if there is one."""


@dataclass(frozen=True)
class Traffic:
    """The state of the downloads.

    Attributes:
        received: bytes received so far by this process.
        total: bytes of the shards that the job reads.
        left: bytes of these shards that were not yet received.
        disk: bytes of shards on disk.
    """

    received: int
    total: int
    left: int
    disk: int


class RemoteFiles(ShardFiles):
    """The shards of one commit.

    Attributes:
        budget: the maximum number of bytes of shards on disk; None downloads into the Hub's cache and keeps all.
        report: also called by the thread that created the object while it waits, every `WAIT` seconds.
    """

    is_local = False

    def __init__(
        self, shards: Mapping[str, Header], transfer: Transfer, cached: Mapping[str, Path], folder: Path | None
    ) -> None:
        """Prepare to read; nothing is written before `claim`.

        Args:
            shards: the headers of the shards.
            transfer: reads ranges.
            cached: shards that are complete in the Hub's cache, which are never removed.
            folder: where shards are kept while they are needed; None if only ranges will be read.
        """
        super().__init__(shards)
        self.budget: int | None = 0
        self._transfer, self._folder, self._creator = transfer, folder, threading.get_ident()
        self._ready: dict[str, Path] = dict(cached)
        self._cached = frozenset(cached)
        self._divide(self._cached)
        self._busy: dict[str, int] = {}
        self._partial: dict[str, int] = {}
        self._failed: dict[str, MoepackError] = {}
        self._broken: DiskError | None = None
        self._postponed: set[str] = set()
        self._wanted: list[str] = []
        self._order: list[str] = []
        self._recent: list[str] = []
        self._together = 1
        self._position = self._received = 0
        self._kept = None if folder is None else KeptTensors(transfer, folder / "tensors")
        self._alone: dict[str, int] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._lock: Lock | None = None

    def _divide(self, whole: Collection[str]) -> None:
        self._parts = Parts(self.shards, whole)
        self._sums = Sums(self._parts, self._transfer.listing, self._pieces)

    def _pieces(self, part: Part) -> Iterator[bytes | memoryview] | None:
        """Return the bytes of a part: kept tensors, and the rest by ranges; None if the rest is large."""
        runs, position, rest = list[Run](), part.start, 0
        tensors = (info for info in self.shards[part.shard].tensors.values() if part.start <= info.offset < part.stop)
        for info in tensors:
            if info.offset >= position and self._kept is not None and self._kept.has(info):
                runs += [(position, info.offset, None), (info.offset, info.offset + info.nbytes, info)]
                rest += info.offset - position
                position = info.offset + info.nbytes
        runs.append((position, part.stop, None))
        return self._read_runs(part.shard, runs) if rest + part.stop - position <= LARGEST_REST else None

    def _read_runs(
        self, shard: str, runs: Sequence[tuple[int, int, TensorInfo | None]]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of ranges of a shard, which are tensors that are kept or None."""
        for start, stop, info in runs:
            found = None if info is None or self._kept is None else self._kept.find(info)
            if found is not None:
                yield found.data
            else:
                yield from self._transfer.stream(shard, start, stop)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each part in bytes. A shard that is one part has its name."""
        return {name: part.size for name, part in self._parts.items()}

    def __reduce__(self) -> tuple[type[RangeFiles], tuple[Mapping[str, Header], Listing]]:
        return RangeFiles, (self.shards, self._transfer.listing)

    def claim(self, budget: int | None) -> None:
        """Lock the folder and take over what an interrupted run left in it.

        Args:
            budget: see the attribute.

        Raises:
            ResumeError: another process uses the folder.
            DiskError: the folder cannot be created.
        """
        assert self._folder is not None, "a folder is needed to keep shards"
        self.budget = budget
        if budget is None:
            self._divide(self.shards)
        try:
            if self._folder.exists() and any(self._folder.iterdir()) and not (self._folder / "tensors").is_dir():
                raise ResumeError(
                    "exists, but was not created by moepack; move it away, or choose another output directory",
                    file=self._folder,
                )
            (self._folder / "tensors").mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self._folder)  # from here on, `close` may remove the folder
            mark = self._folder / self._mark
            if not mark.exists():  # of another commit, other files, or parts that were cut in another way
                for entry in [*self._folder.iterdir(), *(self._folder / "tensors").iterdir()]:
                    if not entry.is_dir():
                        remove(entry)
                mark.touch()
        except BlockingIOError as cause:
            raise ResumeError("another process is using it", file=self._folder) from cause
        except OSError as cause:
            raise DiskError(f"cannot be created: {cause.strerror}", file=self._folder) from cause
        for name, part in self._parts.items():
            file = self._folder / name
            if name not in self._ready and file.exists() and file.stat().st_size == part.size:
                self._ready[name] = file  # it was renamed after all checks
            elif (begun := self._folder / f"{name}.part").exists():
                self._partial[name] = begun.stat().st_size

    @property
    def _mark(self) -> str:
        """The name of an empty file that says which commit, shards and parts a folder holds."""
        listing = self._transfer.listing
        held = [(part.name, listing.files[part.shard].name, part.start) for part in self._parts.values()]
        return f"{listing.commit}-{hashlib.sha256(repr(held).encode()).hexdigest()[:16]}"

    def least(self, groups: Sequence[Collection[TensorInfo]]) -> int:
        """Return the smallest possible budget: the largest total size of parts that a group needs."""
        own = ({self._parts.name_of(info) for info in group} - self._cached for group in groups)
        return max((sum(self._parts[name].size for name in names) for names in own), default=0)

    def expect(self, groups: Sequence[Collection[TensorInfo]]) -> None:
        """See `ShardFiles`. Starts the downloads; a later call replaces the order of those not yet started."""
        members = [dict.fromkeys(map(self._parts.name_of, group)) for group in groups]
        with self._changed:
            self._order = list(dict.fromkeys(name for names in members for name in names))
            if self.budget is None:
                self._order += [name for name in self._parts if name not in self._order]
            self._sums.expect(self._order)
            self._together = max(map(len, members), default=1)
            self._position = 0
            if not self._threads:
                self._shrink()
                for name in self._own():
                    self._sums.add(self._parts[name], self._ready[name])
                self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(AT_ONCE)]
                for thread in self._threads:
                    thread.start()
            self._changed.notify_all()

    def raw(self, info: TensorInfo) -> Bytes:
        """See `ShardFiles`; downloads what is missing.

        Raises:
            DownloadError: the bytes cannot be downloaded.
            DiskError: the disk is full.
        """
        if self._kept is not None and (found := self._kept.find(info)) is not None:
            return found
        name = self._parts.name_of(info)
        with self._changed:
            alone = self._is_read_alone(name, info)
            if not alone:
                self._use(name)
                self._await(name)
                # The file is opened under the lock, because another thread may remove it.
                mapped = map_range(self._ready[name], info, None, info.offset - self._parts[name].start)
                return mapped if name in self._cached or self.budget is None else surviving(mapped)
        return np.frombuffer(self._transfer.filled(info.file.name, info.offset, info.offset + info.nbytes), np.uint8)

    def _is_read_alone(self, name: str, info: TensorInfo) -> bool:
        """Return whether to read a tensor by its range instead of downloading its part `name`; counts its bytes.

        A part that was removed may be needed for a few tensors (a sample of all weights) or for all of them again.
        Ranges of at most a quarter of a part are read before it is downloaded again. So a sample costs what it reads,
        and a complete pass at most a quarter more than without this rule.
        """
        if name in self._ready:
            return False
        if not self._threads:
            return True
        soon = self._order[self._position : self._position + AT_ONCE + self._together]
        if self.budget is None or name in soon or name in self._busy or name in self._wanted:
            return False
        if info.nbytes > LARGEST_ALONE:  # it would take memory
            return False
        read = self._alone.get(name, 0) + info.nbytes
        if read > self._parts[name].size // ALONE:
            return False
        self._alone[name] = read
        return True

    def _await(self, name: str) -> None:
        """Wait for a part; raises as `raw`. Call it with the lock."""
        while name not in self._ready:
            if name in self._failed:
                raise self._failed.pop(name)
            if self._broken is not None:
                raise self._broken
            if self._stopped:
                raise DownloadError(STOPPED, file=name)
            if name not in self._wanted:
                self._wanted.append(name)
                self._changed.notify_all()
            self._changed.wait(WAIT)
            self._tell()

    def _tell(self) -> None:
        if threading.get_ident() == self._creator:
            self.report()

    def _use(self, name: str) -> None:
        """Note that a part is read now."""
        if self._recent and self._recent[-1] == name:
            return
        self._recent = [*(each for each in self._recent if each != name), name]
        if name in self._order:
            self._position = self._order.index(name)
            self._changed.notify_all()

    def sampled(self, shard: str) -> bytes:
        """See `ShardFiles`; requests blocks of a shard that is not on disk."""
        header, blocks = self.shards[shard], sample_positions(self.shards[shard].size)
        with self._changed:
            if shard in self._ready:
                return sampled(self._ready[shard], header.size)
        ends = [(at, min(at + SAMPLE_BYTES, header.size)) for at in blocks]
        if header.size <= len(blocks) * SAMPLE_BYTES:
            whole = self._transfer.read(shard, 0, header.size)
            return b"".join(whole[start:stop] for start, stop in ends)
        return b"".join(at_once(self._transfer, lambda end: self._transfer.read(shard, *end), ends))

    def equal(self, first: TensorInfo, second: TensorInfo) -> bool:
        """See `ShardFiles`; stops at the first difference. Without a folder, compares only the first 8 MiB."""
        for at in range(0, first.span if first.nbytes else 0, COMPARED):
            ends = [
                (each.file.name, each.offset + at, each.offset + min(at + COMPARED, each.span))
                for each in (first, second)
            ]
            one, other = (self._transfer.read(*end) for end in ends)
            if one != other or self._folder is None:
                return one == other
        return True

    def gather(self, infos: Collection[TensorInfo]) -> None:
        """See `ShardFiles`; keeps the tensors in the folder. Tensors in the Hub's cache are not copied.

        Raises as `raw`.
        """
        assert self._kept is not None
        self._kept.gather([info for info in infos if info.file.name not in self._cached], self._tell)

    def release(self, infos: Collection[TensorInfo]) -> None:
        """See `ShardFiles`; removes the tensors."""
        if self._kept is not None:
            self._kept.release(infos)

    @property
    def commit(self) -> str:
        """The commit whose files these are."""
        return self._transfer.listing.commit

    def missing(self) -> list[int]:
        """Return the sizes of the parts that are not in the Hub's cache."""
        return [part.size for name, part in self._parts.items() if name not in self._cached]

    @property
    def absent(self) -> int:
        """The number of shards that are not in the Hub's cache."""
        return len(self.shards.keys() - self._cached)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not verified by the end of a job, in full sentences."""
        names = self._sums.unverified if self.budget is not None else []
        if not names:
            return ()
        return (
            f"The SHA-256 of {', '.join(names)} was not compared with the Hub's, because this run did not read all "
            "parts; the place, the size and the version of every part were.",
        )

    @property
    def needs(self) -> int:
        """See `ShardFiles`."""
        total = sum(self.missing())
        return max(min(total if self.budget is None else self.budget, total) - self.traffic().disk, 0)

    def clear(self) -> None:
        """See `ShardFiles`; removes all shards from the folder, or completes the Hub's cache.

        Raises:
            Altered: a shard in several parts has another SHA-256 than listed.
            DownloadError, DiskError: as for `raw`.
        """
        self._sums.wait(self._tell)
        with self._changed:
            if self.budget is None:
                for name in self._parts:
                    self._await(name)
            self._order, self._wanted = [], []
            for name in self._own():
                self._evict(name)

    def traffic(self) -> Traffic:
        """Return the state of the downloads."""
        with self._changed:
            total = sum(self._parts[name].size for name in self._order)
            known = sum(self._parts[name].size for name in self._order[: self._position] if name not in self._ready)
            known += sum(self._parts[name].size for name in self._order if name in self._ready)
            known += sum(self._busy.values())
            partial = sum(self._busy.values()) + sum(self._partial.values())
            disk = sum(self._parts[name].size for name in self._own()) + partial
            return Traffic(self._received, total, max(total - known, 0), disk)

    def close(self, remove: bool) -> None:
        """Stop the downloads; also remove the folder if `remove`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._transfer.stop()
        for thread in self._threads:
            thread.join(5.0 if remove else 0.5)  # a thread may wait for a server that does not answer
        if self._folder is not None and remove and self._lock is not None:
            remove_tree(self._folder, ignore_errors=True)
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _own(self) -> list[str]:
        """Return the complete parts in the folder, which may be removed. Those in the Hub's cache may not."""
        return [name for name, path in self._ready.items() if path.parent == self._folder]

    def _work(self) -> None:
        """Download shards until `close`; runs in several threads."""
        self._verify()
        while True:
            with self._changed:
                try:
                    while not self._stopped and (name := self._next()) is None:
                        self._changed.wait()
                except DiskError as error:  # nothing was downloaded, so every reader raises it
                    self._broken = error
                    self._changed.notify_all()
                    return
                if self._stopped:
                    return
                assert name is not None
                urgent = name in self._wanted
                self._busy[name] = self._partial.pop(name, 0)
            path, failure = Path(), None
            try:
                path = self._fetched(name)
            except MoepackError as error:
                failure = error
            except Exception as error:  # its reader raises it
                failure = DownloadError(f"cannot be downloaded: {hub_reason(error)}", file=name)
            with self._changed:
                received = self._busy.pop(name)
                if failure is None:
                    self._ready[name] = path
                    self._alone.pop(name, None)
                    self._postponed.discard(name)
                    if self.budget is not None:
                        self._sums.add(self._parts[name], path)
                else:
                    self._partial |= {name: received} if self.budget is not None else {}
                    # A reader gets the error of the download that it asked for. A failed download ahead is repeated
                    # when a reader needs the shard, also if the reader began to wait during the download.
                    self._postponed.add(name)
                    self._failed |= {name: failure} if urgent else {}
                if name in self._wanted and (urgent or failure is None):
                    self._wanted.remove(name)
                self._changed.notify_all()
            self._verify()

    def _verify(self) -> None:
        """Read the parts whose turn it is for their SHA-256. `clear` repeats what fails, and raises."""
        with suppress(Exception):
            self._sums.read()

    def _next(self) -> str | None:
        """Return the shard to download now, after making room for it; None to wait."""
        for name in self._wanted:
            if name not in self._busy and name not in self._ready and self._make_room(name, urgent=True):
                return name
        for name in self._order[self._position :]:
            if name in self._busy or name in self._ready:
                continue
            return name if name not in self._postponed and self._make_room(name, urgent=False) else None
        return None

    def _make_room(self, name: str, urgent: bool) -> bool:
        """Remove shards until `name` fits into the budget; return whether it does.

        Without urgency, shards that the current layer may still read are kept, and shards that come next, too.
        """
        if self.budget is None:
            return True
        ahead = set(self._order[self._position :])
        kept = set(self._recent[-self._together :])
        used = {name: number for number, name in enumerate(self._recent)}
        while True:
            own = self._own()
            taken = sum(self._parts[each].size for each in (*own, *self._busy))
            partial = [each for each in self._partial if each != name]
            if taken + sum(self._partial[each] for each in partial) + self._parts[name].size <= self.budget:
                return True
            idle = [each for each in own if urgent or (each not in kept and each not in ahead)]
            # Evict the least recently read shard first, then shards downloaded ahead, and the current layer last.
            idle.sort(key=lambda each: (each in kept, each in ahead and each not in used, used.get(each, -1)))
            if idle:
                self._evict(idle[0])
            elif partial:
                self._drop(partial[-1])
            else:
                # A shard larger than the budget is an error of the caller. Refusing it would block its reader forever.
                return urgent and not own and not self._busy

    def _shrink(self) -> None:
        """Remove what an earlier run with a larger budget left, parts that are not needed or needed last first."""
        if self.budget is None:
            return
        place = {name: number for number, name in enumerate(self._order)}
        found = {name: self._parts[name].size for name in self._own()} | self._partial
        last = sorted(found, key=lambda name: place.get(name, len(place)))
        while sum(found.values()) > self.budget:
            name = last.pop()
            del found[name]
            if name in self._partial:
                self._drop(name)
            else:
                self._evict(name)

    def _evict(self, name: str) -> None:
        self._sums.forget(self._parts[name])
        path = self._ready.pop(name)
        with disk_errors(path, "remove"):
            remove(path, missing_ok=True)

    def _drop(self, name: str) -> None:
        assert self._folder is not None
        del self._partial[name]
        path = self._folder / f"{name}.part"
        with disk_errors(path, "remove"):
            remove(path, missing_ok=True)

    def _fetched(self, name: str) -> Path:
        """Return a shard, downloaded and checked.

        Raises:
            DownloadError, CheckpointError: it cannot be downloaded, or differs from the listing, twice.
            DiskError: it cannot be written.
        """
        listing, part = self._transfer.listing, self._parts[name]
        if self.budget is None:
            return listing.download(name)
        assert self._folder is not None
        file = self._folder / f"{name}.part"
        for attempt in (1, 2):
            self._receive(name, file)
            try:
                self._check(file, part)
                break
            except CheckpointError:
                remove(file, missing_ok=True)
                if attempt == 2:
                    raise
        self._sums.check()
        with disk_errors(file):
            replace(file, self._folder / name)
        return self._folder / name

    def _receive(self, name: str, file: Path) -> None:
        """Append the missing bytes of a part to its file."""
        part = self._parts[name]
        with disk_errors(file), file.open("ab") as stream:
            start = stream.tell()
            if start > part.size:
                stream.truncate(start := 0)
            with self._changed:
                self._busy[name] = start
            for piece in self._transfer.stream(part.shard, part.start + start, part.stop):
                if self._stopped:
                    raise DownloadError(STOPPED, file=name)
                stream.write(piece)
                with self._changed:
                    self._busy[name] += len(piece)
                    self._received += len(piece)

    def _check(self, file: Path, part: Part) -> None:
        """Compare a downloaded shard with the listing. Of several parts, `Sums` compares the whole."""
        if not part.is_whole:
            return
        name, listed = part.shard, self._transfer.listing.files[part.shard].sha256
        if _digest(file, name) != self.shards[name].digest:
            raise DownloadError("the downloaded header differs from that on the Hub", file=name)
        if listed is None:
            return
        with disk_errors(file), file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != listed:
            raise DownloadError(f"its SHA-256 is {found}, but the Hub lists {listed}", file=name)


def _digest(part: Path, name: str) -> str:
    """Return the digest of the header of a downloaded shard."""
    if name.endswith(SUFFIX):
        return read_gguf(part).header.digest
    return (read_pickle if name.endswith(".bin") else read_header)(part).digest
