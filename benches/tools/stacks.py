"""Samples the stack of the main thread, to divide a job's time among its functions."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY = 0.05
"""Seconds between two samples."""


class Stacks:
    """Counts samples by function of a package while the context lasts.

    Args:
        package: a part of the paths of the files that count.
    """

    def __init__(self, package: str) -> None:
        self._package, self._samples, self._seconds = package, 0, 0.0
        self._within: Counter[str] = Counter()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(threading.main_thread().ident,), daemon=True)

    def __enter__(self) -> Self:
        self._seconds = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._seconds = time.perf_counter() - self._seconds

    def _sample(self, thread: int) -> None:
        while not self._ends.wait(EVERY):
            stack = traceback.extract_stack(sys._current_frames()[thread])
            self._within.update({f"{Path(at.filename).name}:{at.name}" for at in stack if self._package in at.filename})
            self._samples += 1

    def seconds(self, most: int) -> dict[str, float]:
        """Seconds in each function and what it calls, of the functions with the most."""
        each = self._seconds / max(self._samples, 1)
        return {name: round(count * each, 1) for name, count in self._within.most_common(most)}
