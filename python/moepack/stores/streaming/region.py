"""The bytes of a packed tensor in a reserved address range, where an expert occupies memory only while it is needed.

Kernels read a region like a mapped file, so experts of every packed format can be streamed without format-specific
code. Data shared by all experts (header, tables, parameters) is copied at once and stays in memory. The codes of an
expert are loaded by `read` and released by `drop`, in whole pages. Pages at both ends that an expert's codes share with
their neighbors also stay in memory.

Invariant: the bytes equal those of the file, except those of experts that were not read or were dropped, which are
arbitrary (zero on Linux). Code that multiplies by an expert must prevent it from being dropped (`Residency`).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moepack.arrays import as_bytes
from moepack.stores.streaming.source import PAGE, READ, Source
from moepack.system.maps import Reserved

__all__ = ["Piece", "Region"]

Piece = tuple[Source, memoryview, int]
"""A read: the source to read from, and the arguments of its `read`."""


class Region:
    """The address range of a tensor.

    Args:
        source: the file that contains it.
        place: the offset of its first byte in the file.
        data: its mapped bytes, flat uint8; no reference is kept.
        payloads: the byte range of each expert's codes within `data`, [E, 2].

    Raises:
        OSError: the system cannot reserve the address range.

    Attributes:
        data: the bytes, as a flat uint8 tensor.
        shared: bytes that always stay in memory, in whole pages.
        sizes: streamed bytes of each expert.
    """

    def __init__(self, source: Source, place: int, data: NDArray[np.uint8], payloads: NDArray[np.int64]) -> None:
        self._source, phase = source, place % PAGE
        self._phase = phase
        self._place = place - phase
        self._range = Reserved(-(-(phase + len(data)) // PAGE) * PAGE)
        own = np.frombuffer(self._range.memory, np.uint8)[phase : phase + len(data)]
        self._runs = _whole_pages(payloads + phase)
        for start, stop in _between([run for run in self._runs if run], phase, phase + len(data)):
            own[start - phase : stop - phase] = data[start - phase : stop - phase]
        self.sizes = [len(run) for run in self._runs]
        self.shared = self._range.size - sum(self.sizes)
        self.data = as_bytes(own)

    def start(self, expert: int) -> int:
        """The offset within `data` of an expert's first streamed byte."""
        return self._runs[expert].start - self._phase

    def piece(self, expert: int, start: int, stop: int) -> Piece:
        """A read of an expert's streamed bytes from `start` to `stop`, relative to the first one, in whole pages."""
        run = self._runs[expert][start:stop]
        return self._source, memoryview(self._range.memory).cast("B")[run.start : run.stop], self._place + run.start

    def reads(self, expert: int) -> Iterator[Piece]:
        """The reads that load an expert."""
        for start in range(0, self.sizes[expert], READ):
            yield self.piece(expert, start, start + READ)

    def drop(self, expert: int, start: int = 0, stop: int | None = None) -> None:
        """Release the memory of an expert, by default all of it."""
        run = self._runs[expert][start:stop]
        if run:
            self._range.release(run.start, len(run))


def _whole_pages(payloads: NDArray[np.int64]) -> list[range]:
    """The pages that contain only bytes of one payload, for each payload."""
    starts, stops = -(-payloads[:, 0] // PAGE) * PAGE, payloads[:, 1] // PAGE * PAGE
    return [range(start, max(start, stop)) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _between(runs: Sequence[range], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The gaps between runs, from `first` to `last`."""
    ends = [first, *(end for run in sorted(runs, key=lambda run: run.start) for end in (run.start, run.stop)), last]
    return ((start, stop) for start, stop in list(pairwise(ends))[::2])
