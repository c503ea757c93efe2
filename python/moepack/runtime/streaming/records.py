"""Which records of channels are in memory, within a budget: the cache where channels stream one by one.

Missing records that are near each other are read together, because another read would take longer; what lies between
them is forgotten, so that all that is kept was wanted once (`moepack._core.StreamedChannels`). A token asks for
thousands of records, so what is known of them lies in arrays over all records of a model.

On a guess of what the next call wants, records are read while nobody waits for others (`Guesses`); such a read counts
as a use, so that what was read ahead is not what goes next.

When room is needed, records go that nobody holds and whose uses count least, where a use counts half after `HALF_LIFE`
calls (LRFU: Lee and others, 2001): so records that most tokens want stay even where those of one token do not fit. Uses
are counted by stretches of neighbours, which agree on how often they are wanted: of one record there are too few.

Invariants:
- Records in memory, those that are being read included, are never more than the budget.
- A thread waits for room only while it holds nothing, so that waiting ends.
- A record that could not be read is not in memory, and everyone who waits for it tries to read it.
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
from moepack.runtime.streaming.guesses import Guesses
from moepack.runtime.streaming.residency import Statistics

__all__ = ["Numbers", "RecordCache", "RecordTensor"]

STRETCH = 16
"""Neighbouring records whose uses are counted together, and of a guess those that are read together."""

HALF_LIFE = 256
"""Calls after which a use counts half."""

GUESSED = 4
"""One part in so many of the budget is read on a guess at most."""

PAUSE = 32
"""Calls that make no guess after one that took longer than the reads of its call, for there the processor is short, and
while guesses do not pay."""

BATCH = 64
"""One part in so many of the budget goes at least when room is needed: choosing looks at all records."""

_ABSENT, _COMING, _THERE = 0, 1, 2
_GROWTH = 2 ** (1 / HALF_LIFE)

Numbers = NDArray[np.int64]
"""Numbers of records over all tensors, or of one, ascending, each once."""


class RecordTensor(Protocol):
    """A tensor whose records come and go."""

    @property
    def count(self) -> int:
        """How many records it has."""
        ...

    def read(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records, by so many threads at most; how many reads that took, and their bytes."""
        ...

    def drop(self, records: Numbers) -> None:
        """Let records go, if they are there."""
        ...


class RecordCache:
    """Records in memory.

    Args:
        budget: the most records.
        nbytes: what each takes.
        tensors: whose records, in the order of their numbers.
        readers: threads that read.

    Attributes:
        budget: the most records.
        first: the number of each tensor's first record, and behind the last one how many there are.
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
        """What happened so far; hits and misses are records."""
        with self._changed:
            return replace(self._statistics, resident=self._resident * self._nbytes, **self._guesses.counts())

    def hold(self, records: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Have records in memory, at most as many as the budget, until `release`.

        Args:
            records: which.
            meanwhile: makes a guess; is called while reads are under way, if any are, and seldom where that took longer
                than they did or guesses do not pay.

        Raises:
            CorruptionError, LoadError: one cannot be read; none is held.
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
        """Let guesses be read again."""
        with self._changed:
            self._guesses.demands -= 1
            self._changed.notify_all()

    def guess(self, records: Numbers) -> None:
        """Read records that are likely to be wanted next, as long as nobody waits for others."""
        with self._changed:
            absent = records[self._state[records] == _ABSENT][: self.budget // GUESSED]
            parts = np.split(absent, np.flatnonzero(np.diff(absent // STRETCH)) + 1) if len(absent) else []
            self._guesses.make(records.tolist(), parts)

    def _begin(self, records: Numbers) -> Callable[[], None] | None:
        """Make room for records that are read together on a guess."""
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
        """Let records that were held go when room is needed."""
        with self._changed:
            self._holders[records] -= 1
            self._held -= self._unheld(records)
            self._changed.notify_all()

    def _unheld(self, records: Numbers) -> int:
        return int((self._holders[records] == 0).sum())

    def _claim(self, records: Numbers) -> Numbers:
        """Hold records and make room for those that are missing: the caller reads these."""
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
        """Wait until nobody reads any of the records; returns those that another thread could not read, to be read."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._state[records] == _COMING).any())
            return self._absent(records)

    def _absent(self, records: Numbers) -> Numbers:
        """Find records that are not in memory and make room for them: from here on they are coming."""
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
        """The tensors that records are of, each with their numbers there."""
        for number, own in enumerate(np.split(records, np.searchsorted(records, self.first[1:-1]))):
            if len(own):
                yield self._tensors[number], own - self.first[number]

    def _bring(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records; how many reads that took, and their bytes."""
        counts = [tensor.read(own, threads) for tensor, own in self._by_tensor(records)]
        return sum(reads for reads, _ in counts), sum(nbytes for _, nbytes in counts)

    def _read(self, missing: Numbers, meanwhile: Callable[[], None] | None = None) -> None:
        """Read records that are coming."""
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
        """Whether this call makes no guess."""
        self._pause = max(self._pause - 1, 0)
        return self._pause > 0

    def _use_time(self, meanwhile: Callable[[], None], reads: Future[tuple[int, int]]) -> None:
        """Call something while reads are under way; if it took longer than they did, leave it for a while."""
        meanwhile()
        self._pause = PAUSE if reads.done() or not self._guesses.pay else 0

    def _settle(self, missing: Numbers, count: tuple[int, int] | None, guessed: bool = False) -> None:
        """Say to everyone who waits for records how their reads ended; None where they failed."""
        with self._changed:
            if count is None:
                self._drop(missing)
            else:
                self._state[missing] = _THERE
                self._statistics.reads += count[0]
                self._statistics.bytes_read += count[1]
                self._statistics.bytes_guessed += count[1] * guessed
            self._changed.notify_all()
