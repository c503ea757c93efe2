"""A Ctrl-C that Python drops is raised again, and one that becomes another error ends the command like any other."""

import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import moepack.format
from command_support import interruptible, run
from moepack.errors import CorruptionError
from moepack.system.interrupts import interrupt_answered, interrupt_on_termination, interrupts_kept

DROPPED = type("Dropped", (), {"exc_type": KeyboardInterrupt})()


class Destroyed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)


class Watched:
    pass


def destroyed() -> None:
    Destroyed()


def forgotten() -> None:
    watched = Watched()
    weakref.finalize(watched, destroyed)
    watched_too = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
    del watched
    assert watched_too() is None


@pytest.mark.parametrize("drop", [destroyed, forgotten])
def test_a_dropped_interrupt_is_raised_again(drop: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", pytest.fail)  # it is neither printed nor counted as another's
    with interruptible(), pytest.raises(KeyboardInterrupt), interrupts_kept():
        drop()
        time.sleep(10)


def test_a_dropped_request_to_terminate_is_raised_again() -> None:
    former = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_kept():
            interrupt_on_termination()
            sys.unraisablehook(DROPPED)
            time.sleep(10)
    finally:
        signal.signal(signal.SIGTERM, former[0])
        signal.signal(signal.SIGINT, former[1])


def test_an_interrupt_that_the_program_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    termination = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test may have left a handler
    try:
        with interrupts_kept():
            sys.unraisablehook(DROPPED)
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGTERM, termination)
        signal.signal(signal.SIGINT, former)


def test_other_exceptions_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    dropped = type("Dropped", (), {"exc_type": ValueError})()
    with interrupts_kept():
        sys.unraisablehook(dropped)
    assert found == [dropped] and sys.unraisablehook == found.append


def test_an_error_in_place_of_an_interrupt_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def replaced(*_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise CorruptionError("could not determine the shape", file=tmp_path)

    def answered(*_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupt_answered()
        raise CorruptionError("is damaged", file=tmp_path)

    monkeypatch.setattr(moepack.format, "verify", replaced)
    with interruptible():
        assert run(capsys, "verify", tmp_path) == (130, "", "")
    monkeypatch.setattr(moepack.format, "verify", answered)
    with interruptible():
        assert run(capsys, "verify", tmp_path)[0] == 1
    monkeypatch.undo()
    assert run(capsys, "verify", tmp_path)[0] == 1  # the next command's errors are its own
