"""Hands what the engine's thread writes to the event loop, once per step instead of once per piece.

Waking the loop is a system call during which the loop takes the interpreter. The engine then waits for it in the
middle of a step: with 64 answers, up to 64 times. Pieces are therefore collected, and the engine wakes the loop after
it has given all sequences their tokens.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["Handover"]


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
