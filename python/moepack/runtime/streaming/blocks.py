"""Which record blocks are in memory, within a budget of bytes: the cache where channels stream one by one.

A record block, or block here, is a page of a tensor's address range. Larger ones would be kept mostly in vain: of
channels that a token wants with a probability of a fifth, eight neighbours are wanted with one of five sixths. Missing
blocks that are near each other are read together, because another read would take longer; what lies between them goes
to memory of its own and is forgotten, so that all that is kept was wanted once. A token asks for thousands of blocks,
so what is known of them lies in arrays over all blocks of a model, and a thread of the pool takes a list of reads.

On a guess of what the next call wants, blocks are read while nobody waits for others (`Guesses`); such a read counts as
a use, so that what was read ahead is not what goes next.

When room is needed, blocks go that nobody holds and whose uses count least, where a use counts half after `HALF_LIFE`
calls (LRFU: Lee and others, 2001): so blocks that most tokens want stay even where those of one token do not fit. Uses
are counted by stretches of blocks, which therefore go together: giving memory back takes a call of the system for each
run of them.

Invariants:
- The bytes of resident blocks, those that are being read included, never exceed the budget.
- A thread waits for room only while it holds nothing, so that waiting ends.
- A block that could not be read is not resident, and everyone who waits for it tries to read it.
"""

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition

import numpy as np
from numpy.typing import NDArray

from moepack.errors import MoepackError
from moepack.runtime.streaming.guesses import Guesses
from moepack.runtime.streaming.region import Region
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.streaming.source import PAGE, READ, Source

__all__ = ["BLOCK", "Blocks", "Numbers"]

BLOCK = PAGE
"""Bytes of a block."""

GAP = 40 << 10
"""Most bytes between two missing blocks that are read along: a drive reads them in about the time of another read."""

STRETCH = (128 << 10) // BLOCK
"""Neighbouring blocks whose uses are counted together."""

HALF_LIFE = 256
"""Calls after which a use counts half."""

GUESSED = 4
"""One part in so many of the budget is read on a guess at most."""

PAUSE = 32
"""Calls that make no guess after one that took longer than the reads of its call, for there the processor is short, and
while guesses do not pay."""

BATCH = 64
"""One part in so many of the budget goes at least when room is needed: choosing looks at all blocks."""

_ABSENT, _COMING, _THERE = 0, 1, 2
_GROWTH = 2 ** (1 / HALF_LIFE)

Numbers = NDArray[np.int64]
"""Numbers of blocks over all tensors, ascending, each once."""

_FORGOTTEN = memoryview(mmap.mmap(-1, GAP))
"""Where reads put what nobody wants."""


@dataclass(frozen=True)
class _Read:
    """A read of blocks that are near each other.

    Attributes:
        source: the file.
        parts: the memory that it fills, in the order of the file.
        place: of the first byte in the file.
    """

    source: Source
    parts: list[memoryview]
    place: int


class Blocks:
    """Blocks in memory.

    Args:
        budget: the most bytes that they may take.
        regions: the tensors, each with the blocks of its first run.
        readers: threads that read.

    Attributes:
        budget: the most blocks.
        first: the number of each tensor's first block, and behind the last one how many there are.
    """

    def __init__(self, budget: int, regions: Sequence[Region], readers: int) -> None:
        self.budget, self._regions = budget // BLOCK, regions
        counts = [-(-region.sizes[0] // BLOCK) for region in regions]
        self.first: Numbers = np.array([0, *counts], np.int64).cumsum()
        self._state = np.zeros(self.first[-1], np.uint8)
        self._holders = np.zeros(self.first[-1], np.int32)
        self._uses = np.zeros(self.first[-1] // STRETCH + 1)
        self._use = 1.0
        self._pool, self._readers = ThreadPoolExecutor(readers, thread_name_prefix="moepack-read"), readers
        self._changed = Condition()
        self._held = self._resident = self._pause = 0
        self._unused = np.zeros(self.first[-1], bool)
        self._statistics = Statistics()
        self._guesses = Guesses(self._changed, self._begin)

    @property
    def statistics(self) -> Statistics:
        """What happened so far; hits and misses are blocks."""
        with self._changed:
            return replace(self._statistics, resident=self._resident * BLOCK, **self._guesses.counts())

    def hold(self, blocks: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Have blocks in memory, at most as many as the budget, until `release`.

        Args:
            blocks: which.
            meanwhile: makes a guess; is called while reads are under way, if any are, and seldom where that took longer
                than they did or guesses do not pay.

        Raises:
            CorruptionError, LoadError: one cannot be read; none is held.
        """
        start = time.perf_counter()
        missing = self._claim(blocks)
        try:
            self._read(missing, meanwhile)
            while len(missing := self._missed(blocks)):
                self._read(missing)
        except BaseException:
            self.release(blocks)
            raise
        finally:
            self._demanded()
        with self._changed:
            self._statistics.waited += time.perf_counter() - start

    def _demanded(self) -> None:
        """Let guesses be read again."""
        with self._changed:
            self._guesses.demands -= 1
            self._changed.notify_all()

    def guess(self, blocks: Numbers) -> None:
        """Read blocks that are likely to be wanted next, as long as nobody waits for others."""
        with self._changed:
            absent = blocks[self._state[blocks] == _ABSENT][: self.budget // GUESSED]
            apart = (np.diff(absent) > 1 + GAP // BLOCK) | (np.diff(absent // (READ // BLOCK)) > 0)
            parts = np.split(absent, np.flatnonzero(apart) + 1) if len(absent) else []
            self._guesses.make(blocks.tolist(), parts)

    def _begin(self, blocks: Numbers) -> Callable[[], None] | None:
        """Make room for blocks that are read together on a guess."""
        blocks = blocks[self._state[blocks] == _ABSENT][: max(self.budget - self._held, 0)]
        if not len(blocks):
            return None
        self._hold(blocks)
        np.add.at(self._uses, blocks // STRETCH, self._use)
        self._unused[blocks] = True
        self._absent(blocks)
        return lambda: self._read_ahead(blocks)

    def _read_ahead(self, blocks: Numbers) -> None:
        reads, done = self._reads(blocks), False
        try:
            with suppress(MoepackError):
                _read_all(reads)
                done = True
        finally:
            self._settle(blocks, reads, done, guessed=True)
            self.release(blocks)

    def release(self, blocks: Numbers) -> None:
        """Let blocks that were held go when room is needed."""
        with self._changed:
            self._holders[blocks] -= 1
            self._held -= self._unheld(blocks)
            self._changed.notify_all()

    def _unheld(self, blocks: Numbers) -> int:
        return int((self._holders[blocks] == 0).sum())

    def _claim(self, blocks: Numbers) -> Numbers:
        """Hold blocks and make room for those that are missing: the caller reads these."""
        with self._changed:
            self._guesses.meet(blocks.tolist())
            self._guesses.demands += 1
            self._changed.wait_for(lambda: self._held + self._unheld(blocks) <= self.budget)
            self._hold(blocks)
            self._use *= _GROWTH
            if self._use > 1e100:
                self._uses, self._use = self._uses / self._use, 1.0
            np.add.at(self._uses, blocks // STRETCH, self._use)
            self._statistics.bytes_used += int(self._unused[blocks].sum()) * BLOCK
            self._unused[blocks] = False
            missing = self._absent(blocks)
            self._statistics.hits += len(blocks) - len(missing)
            self._statistics.misses += len(missing)
            return missing

    def _hold(self, blocks: Numbers) -> None:
        self._held += self._unheld(blocks)
        self._holders[blocks] += 1

    def _missed(self, blocks: Numbers) -> Numbers:
        """Wait until nobody reads any of the blocks; returns those that another thread could not read, to be read."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._state[blocks] == _COMING).any())
            return self._absent(blocks)

    def _absent(self, blocks: Numbers) -> Numbers:
        """Find blocks that are not in memory and make room for them: from here on they are coming."""
        missing: Numbers = blocks[self._state[blocks] == _ABSENT]
        if (excess := self._resident + len(missing) - self.budget) > 0:
            free = np.flatnonzero((self._state == _THERE) & (self._holders == 0))
            count = min(max(excess, self.budget // BATCH), len(free))
            self._drop(np.sort(free[np.argpartition(self._uses[free // STRETCH], count - 1)[:count]]))
        self._state[missing] = _COMING
        self._resident += len(missing)
        self._statistics.most = max(self._statistics.most, self._resident * BLOCK)
        return missing

    def _drop(self, blocks: Numbers) -> None:
        """Give the memory of blocks back, with that of absent ones between them: so it takes fewer calls."""
        self._state[blocks], self._unused[blocks] = _ABSENT, False
        self._resident -= len(blocks)
        for region, start, stop in self._runs(blocks, np.searchsorted(np.flatnonzero(self._state), blocks)):
            region.drop(0, start, stop)

    def _runs(self, blocks: Numbers, together: Numbers) -> Iterator[tuple[Region, int, int]]:
        """Runs of blocks of a tensor that agree in `together`: the tensor, from and to which of its bytes."""
        owners = np.searchsorted(self.first, blocks, side="right") - 1
        begins = np.flatnonzero((np.diff(together, prepend=together[:1]) != 0) | (np.diff(owners, prepend=-1) != 0))
        places = blocks - self.first[owners]
        starts, stops = places[begins], places[begins + np.diff(begins, append=len(blocks)) - 1] + 1
        for owner, start, stop in zip(owners[begins].tolist(), starts.tolist(), stops.tolist(), strict=True):
            yield self._regions[owner], start * BLOCK, stop * BLOCK

    def _reads(self, blocks: Numbers) -> list[_Read]:
        """The reads that bring blocks."""
        reads: list[_Read] = []
        last, begin, end = None, 0, 0
        for region, first, stop in self._runs(blocks, blocks - np.arange(len(blocks))):
            for start in range(first, stop, READ):
                source, memory, place = region.piece(0, start, min(start + READ, stop))
                if region is last and start - end <= GAP and start + len(memory) - begin <= READ:
                    reads[-1].parts.extend(part for part in (_FORGOTTEN[: start - end], memory) if part)
                else:
                    reads.append(_Read(source, [memory], place))
                    begin = start
                last, end = region, start + len(memory)
        return reads

    def _read(self, missing: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Read blocks that are coming, all at a time."""
        reads, under_way, done = self._reads(missing), list[Future[None]](), False
        try:
            for number in range(min(self._readers, len(reads))):
                under_way.append(self._pool.submit(_read_all, reads[number :: self._readers]))
            if under_way and meanwhile is not None:
                self._use_time(meanwhile, under_way)
            wait(under_way)
            done = all(read.exception() is None for read in under_way)
        finally:
            for read in under_way:
                read.cancel()
            wait(under_way)
            self._settle(missing, reads, done)
        for read in under_way:
            read.result()

    def _use_time(self, meanwhile: Callable[[], None], reads: Sequence[Future[None]]) -> None:
        """Call something while reads are under way; if it took longer than they did, leave it for a while."""
        if self._pause:
            self._pause -= 1
            return
        meanwhile()
        self._pause = PAUSE if all(read.done() for read in reads) or not self._guesses.pay else 0

    def _settle(self, missing: Numbers, reads: Sequence[_Read], done: bool, guessed: bool = False) -> None:
        """Say to everyone who waits for blocks how their reads ended."""
        with self._changed:
            if done:
                self._state[missing] = _THERE
                self._statistics.reads += len(reads)
                nbytes = sum(len(part) for read in reads for part in read.parts)
                self._statistics.bytes_read += nbytes
                self._statistics.bytes_guessed += nbytes * guessed
            else:
                self._drop(missing)
            self._changed.notify_all()


def _read_all(reads: Sequence[_Read]) -> None:
    for read in reads:
        read.source.read_parts(read.parts, read.place)
