"""Reads that nobody waits for yet: what a cache reads ahead on a guess of what will be needed.

Invariants:
- Demand reads come first: no read of a guess begins while one that somebody waits for is under way.
- A guess is dropped when the next one comes, or when somebody asks for what is really needed: of its reads those that
  have begun end, the others never begin.
- A read that fails is forgotten: whoever needs those bytes reads them again and meets the error.

What is read in vain takes memory from what may be needed, and time of the drive and of a processor from what is. So
guesses are read only while most of what they name is needed; while it is not, they are compared and not read.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

__all__ = ["Guesses"]

AHEAD = 4
"""Threads that read on a guess: few, so that a demand finds the drive nearly idle."""


PAYS = 0.5
"""The share of what is guessed that must be needed for guesses to be read: what is read in vain costs about what a
right guess saves, its transfer."""

MEMORY = 8
"""Guesses over which that share is averaged."""


class Guesses:
    """The guess of a cache. Its methods are called while the cache's lock is held.

    Args:
        changed: the lock, which is notified of all changes.
        begin: makes room for a part of a guess and returns what reads it; None where it is there, or there is no room.

    Attributes:
        demands: how many threads wait for reads.
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
        """What happened so far, as `Statistics` names it; guesses count against whoever asks next."""
        return {"guessed": self._guessed, "right": self._right, "wanted": self._wanted, "hidden": self._seconds}

    @property
    def pay(self) -> bool:
        """Whether enough of the last guesses was needed."""
        return self._precision >= PAYS

    def make(self, about: Iterable[Any], parts: Iterable[Any]) -> None:
        """Read parts as long as nothing else is wanted.

        Args:
            about: everything that is guessed to be needed next, also what is in memory.
            parts: what is to be read if guesses pay.
        """
        self._about, self._parts = frozenset(about), deque(parts if self.pay else ())
        for _ in range(min(AHEAD, len(self._parts))):
            self._pool.submit(self._follow, self._parts)

    def meet(self, needed: Collection[Any]) -> None:
        """Hear what is really needed: the guess is over."""
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
        """The next read of a guess, once nobody waits for others; None when the guess is over."""
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
