"""Which record blocks are in memory, within a budget of bytes: the cache where channels stream one by one.

A record block, or block here, is 16 KiB of a tensor's address range, in whole pages. Missing neighbours are read
together, with a block between two of them that nobody asked for, because another read would take longer. Larger blocks
would be read mostly in vain: of channels that a token wants with a probability of a fifth, eight neighbours are wanted
with one of five sixths. A token asks for thousands of blocks, so what is known of them lies in arrays over all blocks
of a model, and a thread of the pool takes a list of reads.

On a guess of what the next call wants, blocks are read while nobody waits for others (`Guesses`); such a read counts as
a use, so that what was read ahead is not what goes next.

When room is needed, blocks go that nobody holds and whose uses count least, where a use counts half after `HALF_LIFE`
calls (LRFU: Lee and others, 2001): so blocks that most tokens want stay even where those of one token do not fit. Uses
are counted by stretches of blocks, which therefore go together: giving memory back takes a call of the system for each
run of neighbours.

Invariants:
- The bytes of resident blocks, those that are being read included, never exceed the budget.
- A thread waits for room only while it holds nothing, so that waiting ends.
- A block that could not be read is not resident, and everyone who waits for it tries to read it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from threading import Condition

import numpy as np
from numpy.typing import NDArray

from moepack.errors import MoepackError
from moepack.runtime.streaming.guesses import Guesses
from moepack.runtime.streaming.region import Piece, Region
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.streaming.source import READ

__all__ = ["BLOCK", "Blocks", "Numbers"]

BLOCK = 16 << 10
"""Bytes of a block; the last one of a tensor may have fewer."""

STRETCH = 8
"""Neighbouring blocks whose uses are counted together: half as many runs go as with single blocks, and as many hit."""

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
        missing, between = self._claim(blocks)
        try:
            try:
                self._read(np.union1d(missing, between), meanwhile)
            finally:
                self.release(between)
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
            parts = np.split(absent, np.flatnonzero(np.diff(absent) > 2) + 1) if len(absent) else []
            self._guesses.make(blocks.tolist(), parts)

    def _begin(self, blocks: Numbers) -> Callable[[], None] | None:
        """Make room for neighbours that are read on a guess."""
        blocks = blocks[self._state[blocks] == _ABSENT][: max(self.budget - self._held, 0)]
        if not len(blocks):
            return None
        self._hold(blocks)
        np.add.at(self._uses, blocks // STRETCH, self._use)
        self._unused[blocks] = True
        self._absent(blocks)
        return lambda: self._read_ahead(blocks)

    def _read_ahead(self, blocks: Numbers) -> None:
        pieces = [region.piece(0, *run) for region, *run in self._runs(blocks, READ // BLOCK)]
        done = False
        try:
            with suppress(MoepackError):
                _read_all(pieces)
                done = True
        finally:
            self._settle(blocks, pieces, done, guessed=True)
            self.release(blocks)

    def release(self, blocks: Numbers) -> None:
        """Let blocks that were held go when room is needed."""
        with self._changed:
            self._holders[blocks] -= 1
            self._held -= self._unheld(blocks)
            self._changed.notify_all()

    def _unheld(self, blocks: Numbers) -> int:
        return int((self._holders[blocks] == 0).sum())

    def _claim(self, blocks: Numbers) -> tuple[Numbers, Numbers]:
        """Hold blocks, and blocks between those that are missing, for which there is room: the caller reads both."""
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
            between = self._between(missing)[: self.budget - self._held]
            self._hold(between)
            self._absent(between)
            self._statistics.hits += len(blocks) - len(missing)
            self._statistics.misses += len(missing)
            return missing, between

    def _hold(self, blocks: Numbers) -> None:
        self._held += self._unheld(blocks)
        self._holders[blocks] += 1

    def _between(self, missing: Numbers) -> Numbers:
        """Blocks of the same tensor that are not in memory, each between two that are read."""
        found = missing[:-1][np.diff(missing) == 2] + 1
        owners = np.searchsorted(self.first, np.stack([found - 1, found + 1]), side="right")
        between: Numbers = found[(self._state[found] == _ABSENT) & (owners[0] == owners[1])]
        return between

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
        """Give the memory of blocks back."""
        for region, start, stop in self._runs(blocks, len(self._state)):
            region.drop(0, start, stop)
        self._state[blocks], self._unused[blocks] = _ABSENT, False
        self._resident -= len(blocks)

    def _runs(self, blocks: Numbers, most: int) -> Iterator[tuple[Region, int, int]]:
        """Neighbours among blocks, at most so many together: their tensor, and from and to which byte of its run."""
        owners = np.searchsorted(self.first, blocks, side="right") - 1
        begins = np.flatnonzero((np.diff(blocks, prepend=-2) != 1) | (np.diff(owners, prepend=-1) != 0))
        places = (blocks - self.first[owners])[begins].tolist()
        counts = np.diff(begins, append=len(blocks)).tolist()
        for owner, start, count in zip(owners[begins].tolist(), places, counts, strict=True):
            for place in range(start, start + count, most):
                yield self._regions[owner], place * BLOCK, min(place + most, start + count) * BLOCK

    def _read(self, missing: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Read blocks that are coming, all at a time."""
        pieces = [region.piece(0, *run) for region, *run in self._runs(missing, READ // BLOCK)]
        reads: list[Future[None]] = []
        done = False
        try:
            for number in range(min(self._readers, len(pieces))):
                reads.append(self._pool.submit(_read_all, pieces[number :: self._readers]))
            if reads and meanwhile is not None:
                self._use_time(meanwhile, reads)
            wait(reads)
            done = all(read.exception() is None for read in reads)
        finally:
            for read in reads:
                read.cancel()
            wait(reads)
            self._settle(missing, pieces, done)
        for read in reads:
            read.result()

    def _use_time(self, meanwhile: Callable[[], None], reads: Sequence[Future[None]]) -> None:
        """Call something while reads are under way; if it took longer than they did, leave it for a while."""
        if self._pause:
            self._pause -= 1
            return
        meanwhile()
        self._pause = PAUSE if all(read.done() for read in reads) or not self._guesses.pay else 0

    def _settle(self, missing: Numbers, pieces: Sequence[Piece], done: bool, guessed: bool = False) -> None:
        """Say to everyone who waits for blocks how their reads ended."""
        with self._changed:
            if done:
                self._state[missing] = _THERE
                self._statistics.reads += len(pieces)
                nbytes = sum(len(memory) for _, memory, _ in pieces)
                self._statistics.bytes_read += nbytes
                self._statistics.bytes_guessed += nbytes * guessed
            else:
                self._drop(missing)
            self._changed.notify_all()


def _read_all(pieces: Sequence[Piece]) -> None:
    for source, memory, place in pieces:
        source.read(memory, place)
