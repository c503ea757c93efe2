"""Tensors that are read twice, at the start and at the end of a job, kept on disk apart from their shards.

Tensors of a pickle may share their bytes, which are then kept once, until the last of them is released.

Invariant: a file in the folder is complete; it is written under another name and renamed.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from moepack.checkpoint.remote.transfer import Transfer
from moepack.checkpoint.shards import Bytes, map_range
from moepack.format.atomic import disk_errors
from moepack.format.header import TensorInfo
from moepack.system.files import KEEPS_REMOVED, remove, replace

__all__ = ["RANGES_AT_ONCE", "KeptTensors", "at_once", "surviving"]

RANGES_AT_ONCE = 16
"""Ranges that are requested at the same time. They are small, so that the time of an answer dominates."""

GAP = 256 << 10
"""Largest hole in bytes between two tensors that are read by one request."""


Item = TypeVar("Item")
Result = TypeVar("Result")


class KeptTensors:
    """The tensors in a folder."""

    def __init__(self, transfer: Transfer, folder: Path) -> None:
        self._transfer, self._folder = transfer, folder
        self._complete: set[str] = set()
        self._users: defaultdict[str, set[str]] = defaultdict(set)

    def has(self, info: TensorInfo) -> bool:
        """Return whether a tensor is kept."""
        return _key(info) in self._complete

    def find(self, info: TensorInfo) -> Bytes | None:
        """Return the bytes of a tensor; None if it is not kept."""
        return surviving(map_range(self._folder / _key(info), info, None, 0)) if self.has(info) else None

    def gather(self, infos: Collection[TensorInfo], report: Callable[[], None]) -> None:
        """Download tensors that the folder does not hold yet.

        Raises:
            DownloadError: the bytes cannot be downloaded.
            DiskError: the disk is full.
        """
        missing = {}
        for info in infos:
            file, key = self._folder / _key(info), _key(info)
            self._users[key].add(info.name)
            if file.exists() and file.stat().st_size == info.nbytes:
                self._complete.add(key)
            elif info.nbytes and info.strides is None:
                missing[key] = info
        for keys in at_once(self._transfer, self._keep, _runs(missing.values())):
            self._complete.update(keys)
            report()

    def release(self, infos: Collection[TensorInfo]) -> None:
        """Remove tensors."""
        for info in infos:
            key = _key(info)
            self._users[key].discard(info.name)
            if key in self._complete and not self._users[key]:
                self._complete.discard(key)
                remove(self._folder / key, missing_ok=True)

    def _keep(self, run: Sequence[TensorInfo]) -> list[str]:
        """Download neighbouring tensors into files of their own."""
        position, stop = run[0].offset, run[-1].offset + run[-1].nbytes
        pieces = _Pieces(self._transfer.stream(run[0].file.name, position, stop))
        for info in run:
            deque(pieces.take(info.offset - position), maxlen=0)
            part = self._folder / f"{_key(info)}.part"
            with disk_errors(part), part.open("wb") as stream:
                stream.writelines(pieces.take(info.nbytes))
            with disk_errors(part):
                replace(part, self._folder / _key(info))
            position = info.offset + info.nbytes
        return [_key(info) for info in run]


class _Pieces:
    """A stream of bytes that is taken apart at given lengths."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream, self._rest = stream, b""

    def take(self, count: int) -> Iterator[bytes]:
        """Yield the next `count` bytes."""
        while count:
            piece = self._rest or next(self._stream)
            taken, self._rest = piece[:count], piece[count:]
            count -= len(taken)
            yield taken


def at_once(transfer: Transfer, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of work that reads ranges in threads, in order. Ctrl-C ends streams that have begun."""
    with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
        try:
            yield from pool.map(work, items)
        except Exception:
            raise
        except BaseException:
            transfer.stop()
            raise


def surviving(mapped: Bytes) -> Bytes:
    """Return mapped bytes that stay readable after their file is removed: a copy where a map forbids the removal."""
    return mapped if KEEPS_REMOVED else mapped.copy()


def _key(info: TensorInfo) -> str:
    """Return the file name of a kept tensor, which does not depend on how the tensor was renamed."""
    return f"{info.file.name.removesuffix('.safetensors')}-{info.offset}-{info.nbytes}"


def _runs(infos: Collection[TensorInfo]) -> list[list[TensorInfo]]:
    """Group tensors that are neighbours in their shard."""
    runs: list[list[TensorInfo]] = []
    for info in sorted(infos, key=lambda each: (each.file.name, each.offset)):
        last = runs[-1][-1] if runs else None
        if last is not None and last.file == info.file and 0 <= info.offset - last.offset - last.nbytes <= GAP:
            runs[-1].append(info)
        else:
            runs.append([info])
    return runs
