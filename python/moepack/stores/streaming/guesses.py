"""Speculative reads: a cache reads what a prediction says will be needed.

Invariants:
- Demand reads have priority: no speculative read starts while a thread waits for a demand read.
- A guess is dropped when the next one arrives, or when the actual demand is known. Reads that have started are
  completed; the others never start.
- A failed read is ignored. If the bytes are needed, they are read again and the error is reported then.

A wrong guess takes memory from data that may be needed, and time of the drive and a core from demand reads. Guesses are
therefore only read while most of their contents turn out to be needed. Otherwise they are compared, but not read.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

__all__ = ["Guesses"]

AHEAD = 4
"""Threads for speculative reads: few, so that demand reads find the drive nearly idle."""


PAYS = 0.5
"""The fraction of a guess that must turn out to be needed for guesses to be read: a wrong read costs about as much as a
right one saves, namely its transfer."""

MEMORY = 8
"""The number of guesses over which that fraction is averaged."""


class Guesses:
    """The current guess of a cache. Callers of its methods hold the cache's lock.

    Args:
        changed: the lock, notified of all changes.
        begin: makes room for a part of a guess and returns a function that reads it; None if it is in memory or there
            is no room.

    Attributes:
        demands: the number of threads that wait for demand reads.
    """

    def __init__(self, changed: Condition, begin: Callable[[Any], Callable[[], None] | None]) -> None:
        self._changed, self._begin = changed, begin
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="moepack-guess")
        self._parts: deque[Any] = deque()
        self._about: frozenset[Any] = frozenset()
        self._active, self._since = 0, 0.0
        self.demands = self._guessed = self._right = self._wanted = 0
        self._seconds, self._precision = 0.0, 1.0

    def counts(self) -> dict[str, Any]:
        """Return counters, with the names of `Statistics`; each guess is compared with the next demand."""
        return {"guessed": self._guessed, "right": self._right, "wanted": self._wanted, "hidden": self._seconds}

    @property
    def pay(self) -> bool:
        """Whether a sufficient fraction of recent guesses was needed."""
        return self._precision >= PAYS

    def make(self, about: Iterable[Any], parts: Iterable[Any]) -> None:
        """Read parts as long as there is no other demand.

        Args:
            about: everything predicted to be needed next, including what is in memory.
            parts: what to read if guesses pay.
        """
        self._about, self._parts = frozenset(about), deque(parts if self.pay else ())
        for _ in range(min(AHEAD, len(self._parts))):
            self._pool.submit(self._follow, self._parts)

    def meet(self, needed: Collection[Any]) -> None:
        """Compare the guess with the actual demand; this ends the guess."""
        self._parts = deque()
        if self._about and needed:
            right = len(self._about.intersection(needed))
            self._guessed += len(self._about)
            self._right += right
            self._wanted += len(needed)
            self._precision += (right / len(self._about) - self._precision) / MEMORY
        self._about = frozenset()

    def _follow(self, parts: deque[Any]) -> None:
        while (read := self._next(parts)) is not None:
            try:
                read()
            finally:
                self._ended()

    def _next(self, parts: deque[Any]) -> Callable[[], None] | None:
        """Wait until there is no demand and return the guess's next read; None if the guess has ended."""
        with self._changed:
            self._changed.wait_for(lambda: parts is not self._parts or not self.demands)
            while parts is self._parts and parts:
                if (read := self._begin(parts.popleft())) is not None:
                    self._since = time.perf_counter() if not self._active else self._since
                    self._active += 1
                    return read
        return None

    def _ended(self) -> None:
        with self._changed:
            self._active -= 1
            if not self._active:
                self._seconds += time.perf_counter() - self._since
