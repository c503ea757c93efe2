"""Ctrl-C and requests to terminate: each ends the command, wherever it arrives.

Python's default handler raises `KeyboardInterrupt`, but two kinds of code lose it:

- Destructors, callbacks of weak references and some callbacks of extensions (pydantic's, while it builds the schema of
  a class) report exceptions to `sys.unraisablehook` and drop them. `interrupts_kept` raises a dropped one again.
- Some code replaces it with an error of its own that does not name it as the cause, such as safetensors while torch
  makes a tensor. `was_interrupted` tells that an error may be such a replacement.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interrupt_answered", "interrupt_on_termination", "interrupts_kept", "was_interrupted"]

_PAUSE = 0.02
"""Seconds until a dropped interrupt is raised again: the code that dropped it has ended by then."""

_interrupted = False
"""Whether an interrupt has arrived that the command has not answered."""

if sys.platform == "win32":
    _TERMINATION = (signal.SIGTERM, signal.SIGBREAK)  # Windows sends SIGBREAK when it closes the console

    def _send(number: int) -> None:
        signal.raise_signal(number)

else:
    _TERMINATION = (signal.SIGTERM,)

    def _send(number: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # also ends a system call


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Return whether an error that is raised now may be the consequence of an interrupt."""
    return _interrupted


def interrupt_answered() -> None:
    """Forget the interrupt: the command has caught it and goes on, so that later errors are its own."""
    global _interrupted
    _interrupted = False


def interrupt_on_termination() -> None:
    """Let a request to terminate raise `KeyboardInterrupt`, as Ctrl-C does. Call it in the main thread."""
    for number in _TERMINATION:
        signal.signal(number, _interrupt)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise interrupts that were dropped again, and note each for `was_interrupted`.

    SIGINT keeps a handler that is not Python's default, and stays ignored if it was. Outside the main thread, which
    alone receives signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt_answered()  # an earlier command in this process may have left one
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
