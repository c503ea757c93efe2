"""Ctrl-C and requests to terminate: each ends the command, wherever it arrives.

Python's default handler raises `KeyboardInterrupt`, but two kinds of code lose it:

- Destructors, callbacks of weak references and some callbacks of extensions (pydantic's, while it builds the schema of
  a class) report exceptions to `sys.unraisablehook` and drop them. `interrupts_kept` raises a dropped one again.
- Some extensions replace an exception in a callback with their own (safetensors, while torch makes a tensor), without
  its cause. `interrupted_lately` tells that an error may be such a replacement.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interrupt_on_termination", "interrupted_lately", "interrupts_kept"]

_PAUSE = 0.02
"""Seconds until a dropped interrupt is raised again: the code that dropped it has ended by then."""

_LATELY = 1.0
"""Seconds after an interrupt in which an error counts as its consequence."""

_last = float("-inf")
"""`time.monotonic()` of the last interrupt."""

if sys.platform == "win32":
    _TERMINATION = (signal.SIGTERM, signal.SIGBREAK)  # Windows sends SIGBREAK when it closes the console

    def _send(number: int) -> None:
        signal.raise_signal(number)

else:
    _TERMINATION = (signal.SIGTERM,)

    def _send(number: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # also ends a system call


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    global _last
    _last = time.monotonic()
    raise KeyboardInterrupt


def interrupted_lately() -> bool:
    """Return whether an error that is raised now may be the consequence of an interrupt."""
    return time.monotonic() - _last < _LATELY


def interrupt_on_termination() -> None:
    """Let a request to terminate raise `KeyboardInterrupt`, as Ctrl-C does. Call it in the main thread."""
    for number in _TERMINATION:
        signal.signal(number, _interrupt)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise interrupts that were dropped again, and note the time of each for `interrupted_lately`.

    SIGINT keeps a handler that is not Python's default, and stays ignored if it was. Outside the main thread, which
    alone receives signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _last
    _last = float("-inf")
    handler, others = signal.getsignal(signal.SIGINT), sys.unraisablehook
    pending: list[threading.Timer] = []

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            others(dropped)
            return
        numbers = (number for number in (signal.SIGINT, *_TERMINATION) if signal.getsignal(number) is _interrupt)
        if number := next(numbers, None):
            again = threading.Timer(_PAUSE, _send, (number,))
            again.daemon = True
            pending.append(again)
            again.start()

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others
        for again in pending:
            again.cancel()
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)
