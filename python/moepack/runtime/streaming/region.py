"""The bytes of a packed tensor in an address range of their own, where an expert takes memory only while it is needed.

Kernels read a region as they read a mapped file, so experts of every packed format stream without a line in the format.
What all experts share (header, tables, parameters) is copied at once and stays; an expert's codes come with `read` and
go with `drop`, in whole pages. The pages at both ends of its codes, which it shares with its neighbours, stay too.

Invariant: the bytes are those of the file, but for experts that were not read or were dropped, which are zeros. Whoever
multiplies by an expert keeps it from being dropped (`Residency`).
"""

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moepack.arrays import as_bytes
from moepack.runtime.streaming.source import PAGE, READ, Source

__all__ = ["Piece", "Region"]

Piece = tuple[Source, memoryview, int]
"""A read: whose `read`, and its arguments."""

_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python does not name: the range may be larger than the memory."""


class Region:
    """A tensor's address range.

    Args:
        source: the file that holds it.
        place: its first byte there.
        data: its bytes, flat uint8, mapped; they are not kept.
        payloads: where the bytes of each expert's codes lie in it, [E, 2].

    Raises:
        OSError: the system refuses the address range.

    Attributes:
        data: the bytes, flat uint8 as a tensor.
        shared: how many of them stay in memory, in whole pages.
        sizes: bytes of each expert that come and go.
    """

    def __init__(self, source: Source, place: int, data: NDArray[np.uint8], payloads: NDArray[np.int64]) -> None:
        self._source, phase = source, place % PAGE
        self._phase = phase
        self._place = place - phase
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, -(-(phase + len(data)) // PAGE) * PAGE, flags=flags)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would bring bytes of other experts
        own = np.frombuffer(self._memory, np.uint8)[phase : phase + len(data)]
        self._runs = _whole_pages(payloads + phase)
        for start, stop in _between([run for run in self._runs if run], phase, phase + len(data)):
            own[start - phase : stop - phase] = data[start - phase : stop - phase]
        self.sizes = [len(run) for run in self._runs]
        self.shared = len(self._memory) - sum(self.sizes)
        self.data = as_bytes(own)

    def start(self, expert: int) -> int:
        """Where in `data` the first byte lies of those of an expert that come and go."""
        return self._runs[expert].start - self._phase

    def piece(self, expert: int, start: int, stop: int) -> Piece:
        """The read of some of the bytes of an expert that come and go, counted from the first of them, whole pages."""
        run = self._runs[expert][start:stop]
        return self._source, memoryview(self._memory)[run.start : run.stop], self._place + run.start

    def reads(self, expert: int) -> Iterator[Piece]:
        """The reads that bring an expert."""
        for start in range(0, self.sizes[expert], READ):
            yield self.piece(expert, start, start + READ)

    def drop(self, expert: int, start: int = 0, stop: int | None = None) -> None:
        """Give memory of an expert back, by default all of it."""
        run = self._runs[expert][start:stop]
        if run:
            self._memory.madvise(mmap.MADV_DONTNEED, run.start, len(run))


def _whole_pages(payloads: NDArray[np.int64]) -> list[range]:
    """The pages that belong to one payload alone."""
    starts, stops = -(-payloads[:, 0] // PAGE) * PAGE, payloads[:, 1] // PAGE * PAGE
    return [range(start, max(start, stop)) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _between(runs: Sequence[range], first: int, last: int) -> Iterator[tuple[int, int]]:
    """What lies outside of runs, from `first` to `last`."""
    ends = [first, *(end for run in sorted(runs, key=lambda run: run.start) for end in (run.start, run.stop)), last]
    return ((start, stop) for start, stop in list(pairwise(ends))[::2])
