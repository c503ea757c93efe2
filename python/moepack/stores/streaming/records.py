"""A cache of channel records within a memory budget, for streaming single channels.

Missing records that are close to each other in the file are read together, because a separate read would take longer.
The bytes between them are discarded, so only requested records are kept (`moepack._core.StreamedChannels`). A token
requests thousands of records, so bookkeeping uses arrays over all records of a model.

Records predicted for the next call are read while no thread waits for demand reads (`Guesses`). A speculative read
counts as a use, so that its records are not the next to be evicted.

To make room, the cache evicts unreferenced records with the lowest use counts. The weight of a use halves every
`HALF_LIFE` calls (LRFU: Lee and others, 2001). Records that most tokens need therefore stay in memory even if the
records of a single token do not fit. Uses are counted per stretch of neighboring records, which are needed at similar
rates; a single record has too few uses.

Invariants:
- The number of records in memory, including those being read, never exceeds the budget.
- A thread waits for room only while it holds no records, so waiting terminates.
- A record whose read failed is not in memory, and every thread that waits for it tries to read it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Condition
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moepack.errors import MoepackError
from moepack.stores.streaming.guesses import Guesses
from moepack.stores.streaming.residency import Statistics

__all__ = ["Numbers", "RecordCache", "RecordTensor"]

STRETCH = 16
"""Neighboring records whose uses are counted together; guesses are also read in stretches of this length."""

HALF_LIFE = 256
"""Calls after which the weight of a use halves."""

GUESSED = 4
"""At most 1/`GUESSED` of the budget is read speculatively."""

PAUSE = 32
"""Calls without a prediction after one that took longer than its call's reads (the processor is then the bottleneck),
and while guesses do not pay."""

BATCH = 64
"""At least 1/`BATCH` of the budget is evicted at once, because choosing scans all records."""

_ABSENT, _COMING, _THERE = 0, 1, 2
_GROWTH = 2 ** (1 / HALF_LIFE)

Numbers = NDArray[np.int64]
"""Unique ascending record indices, over all tensors or within one."""


class RecordTensor(Protocol):
    """A tensor whose records are loaded and evicted."""

    @property
    def count(self) -> int:
        """The number of records."""
        ...

    def read(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records with at most `threads` threads; return the number of reads and their bytes."""
        ...

    def drop(self, records: Numbers) -> None:
        """Evict records that are in memory."""
        ...


class RecordCache:
    """Channel records in memory.

    Args:
        budget: the most records.
        nbytes: bytes per record.
        tensors: the tensors of the records, in index order.
        readers: the number of reading threads.

    Attributes:
        budget: the most records.
        first: the index of each tensor's first record, followed by the total count.
    """

    def __init__(self, budget: int, nbytes: int, tensors: Sequence[RecordTensor], readers: int) -> None:
        self.budget, self._nbytes, self._tensors, self._readers = budget, nbytes, tensors, readers
        self.first: Numbers = np.array([0, *(tensor.count for tensor in tensors)], np.int64).cumsum()
        self._state = np.zeros(self.first[-1], np.uint8)
        self._holders = np.zeros(self.first[-1], np.int32)
        self._uses = np.zeros(self.first[-1] // STRETCH + 1)
        self._use = 1.0
        self._pool = ThreadPoolExecutor(thread_name_prefix="moepack-read")
        self._changed = Condition()
        self._held = self._resident = self._pause = 0
        self._unused = np.zeros(self.first[-1], bool)
        self._statistics = Statistics()
        self._guesses = Guesses(self._changed, self._begin)

    @property
    def statistics(self) -> Statistics:
        """Counters; hits and misses count records."""
        with self._changed:
            return replace(self._statistics, resident=self._resident * self._nbytes, **self._guesses.counts())

    def hold(self, records: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Load records, at most `budget`, and keep them in memory until `release`.

        Args:
            records: the records.
            meanwhile: makes a prediction. It is called while reads are in flight, and skipped for a while after it took
                longer than the reads or guesses did not pay.

        Raises:
            CorruptionError, LoadError: a record cannot be read; none is held.
        """
        start = time.perf_counter()
        missing = self._claim(records)
        try:
            self._read(missing, meanwhile)
            while len(missing := self._missed(records)):
                self._read(missing)
        except BaseException:
            self.release(records)
            raise
        finally:
            self._demanded()
        with self._changed:
            self._statistics.waited += time.perf_counter() - start

    def _demanded(self) -> None:
        """Allow speculative reads again."""
        with self._changed:
            self._guesses.demands -= 1
            self._changed.notify_all()

    def guess(self, records: Numbers) -> None:
        """Read records that are likely to be needed next, as long as no thread waits for others."""
        with self._changed:
            absent = records[self._state[records] == _ABSENT][: self.budget // GUESSED]
            parts = np.split(absent, np.flatnonzero(np.diff(absent // STRETCH)) + 1) if len(absent) else []
            self._guesses.make(records.tolist(), parts)

    def _begin(self, records: Numbers) -> Callable[[], None] | None:
        """Make room for a group of records that a guess reads together."""
        records = records[self._state[records] == _ABSENT][: max(self.budget - self._held, 0)]
        if not len(records):
            return None
        self._hold(records)
        np.add.at(self._uses, records // STRETCH, self._use)
        self._unused[records] = True
        self._absent(records)
        return lambda: self._read_ahead(records)

    def _read_ahead(self, records: Numbers) -> None:
        count = None
        try:
            with suppress(MoepackError):
                count = self._bring(records, 1)
        finally:
            self._settle(records, count, guessed=True)
            self.release(records)

    def release(self, records: Numbers) -> None:
        """Release held records, which makes them evictable."""
        with self._changed:
            self._holders[records] -= 1
            self._held -= self._unheld(records)
            self._changed.notify_all()

    def _unheld(self, records: Numbers) -> int:
        return int((self._holders[records] == 0).sum())

    def _claim(self, records: Numbers) -> Numbers:
        """Hold records and make room for missing ones, which the caller must read."""
        with self._changed:
            self._guesses.meet(records.tolist())
            self._guesses.demands += 1
            self._changed.wait_for(lambda: self._held + self._unheld(records) <= self.budget)
            self._hold(records)
            self._use *= _GROWTH
            if self._use > 1e100:
                self._uses, self._use = self._uses / self._use, 1.0
            np.add.at(self._uses, records // STRETCH, self._use)
            self._statistics.bytes_used += int(self._unused[records].sum()) * self._nbytes
            self._unused[records] = False
            missing = self._absent(records)
            self._statistics.hits += len(records) - len(missing)
            self._statistics.misses += len(missing)
            return missing

    def _hold(self, records: Numbers) -> None:
        self._held += self._unheld(records)
        self._holders[records] += 1

    def _missed(self, records: Numbers) -> Numbers:
        """Wait until none of the records is being read; return those that another thread failed to read."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._state[records] == _COMING).any())
            return self._absent(records)

    def _absent(self, records: Numbers) -> Numbers:
        """Find records that are not in memory, make room for them, and mark them as being read."""
        missing: Numbers = records[self._state[records] == _ABSENT]
        if (excess := self._resident + len(missing) - self.budget) > 0:
            free = np.flatnonzero((self._state == _THERE) & (self._holders == 0))
            count = min(max(excess, self.budget // BATCH), len(free))
            self._drop(np.sort(free[np.argpartition(self._uses[free // STRETCH], count - 1)[:count]]))
        self._state[missing] = _COMING
        self._resident += len(missing)
        self._statistics.most = max(self._statistics.most, self._resident * self._nbytes)
        return missing

    def _drop(self, records: Numbers) -> None:
        self._state[records], self._unused[records] = _ABSENT, False
        self._resident -= len(records)
        for tensor, own in self._by_tensor(records):
            tensor.drop(own)

    def _by_tensor(self, records: Numbers) -> Iterator[tuple[RecordTensor, Numbers]]:
        """The tensors of the records, each with the records' indices within it."""
        for number, own in enumerate(np.split(records, np.searchsorted(records, self.first[1:-1]))):
            if len(own):
                yield self._tensors[number], own - self.first[number]

    def _bring(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records; return the number of reads and their bytes."""
        counts = [tensor.read(own, threads) for tensor, own in self._by_tensor(records)]
        return sum(reads for reads, _ in counts), sum(nbytes for _, nbytes in counts)

    def _read(self, missing: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Read records that are marked as being read."""
        count = None
        try:
            if meanwhile is None or not len(missing) or self._pauses():
                count = self._bring(missing, self._readers)
            else:
                coming = self._pool.submit(self._bring, missing, self._readers)
                try:
                    self._use_time(meanwhile, coming)
                finally:
                    count = coming.result()
        finally:
            self._settle(missing, count)

    def _pauses(self) -> bool:
        """Whether this call skips the prediction."""
        self._pause = max(self._pause - 1, 0)
        return self._pause > 0

    def _use_time(self, meanwhile: Callable[[], None], reads: Future[tuple[int, int]]) -> None:
        """Call `meanwhile` while reads are in flight; pause it if it took longer than they did."""
        meanwhile()
        self._pause = PAUSE if reads.done() or not self._guesses.pay else 0

    def _settle(self, missing: Numbers, count: tuple[int, int] | None, guessed: bool = False) -> None:
        """Record the outcome of reads and notify waiting threads; `count` is None if the reads failed."""
        with self._changed:
            if count is None:
                self._drop(missing)
            else:
                self._state[missing] = _THERE
                self._statistics.reads += count[0]
                self._statistics.bytes_read += count[1]
                self._statistics.bytes_guessed += count[1] * guessed
            self._changed.notify_all()
