"""Hands what the engine's thread writes to the event loop, once per step instead of once per piece.

Waking the loop is a system call during which the loop takes the interpreter. The engine then waits for it in the
middle of a step: with 64 answers, up to 64 times. Pieces are therefore collected, and the engine wakes the loop after
it has given all sequences their tokens.

An engine may answer several applications and event loops, each with a `Handover` of its own.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from moepack.serving.engine import Engine

__all__ = ["Handover", "Handovers", "handover_of"]


class Handover:
    """Calls of other threads that an event loop runs in order.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def add(self, function: Callable[..., object], *args: Any) -> None:
        """Add a call, which runs after the next `wake`."""
        self._calls.append((function, args))

    def wake(self) -> None:
        """Let the loop run all calls, if there are any."""
        if self._calls:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)


class Handovers:
    """The handovers of an engine, by event loop."""

    def __init__(self) -> None:
        self._each: dict[asyncio.AbstractEventLoop, Handover] = {}
        self._lock = threading.Lock()

    def here(self) -> Handover:
        """Return the handover of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._each:  # the engine's thread iterates over the dict, so it is replaced
                kept = {other: handover for other, handover in self._each.items() if not other.is_closed()}
                self._each = {**kept, loop: Handover(loop)}
            return self._each[loop]

    def wake(self) -> None:
        """Let each loop run its calls."""
        for handover in self._each.values():
            handover.wake()


_known: WeakKeyDictionary[Engine, Handovers] = WeakKeyDictionary()
_lock = threading.Lock()


def handover_of(engine: Engine) -> Handover:
    """Return the way from an engine to the running event loop; the engine's steps wake it."""
    with _lock:
        handovers = _known.get(engine)
        if handovers is None:
            handovers = _known[engine] = Handovers()
            engine.on_step = handovers.wake
    return handovers.here()
