"""Runs the command line in this process, and starts processes that Ctrl-C ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moepack.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the processes started inside react to SIGINT, which background jobs of a shell and their children ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
