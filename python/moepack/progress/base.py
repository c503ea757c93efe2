"""The interface between a job and a progress display."""

from typing import Protocol


class Progress(Protocol):
    """Receives a job's progress.

    Calls come from one thread: `prepare`, `start`, then any of the others, and `finish`. A job that measures first
    calls `start` twice. `finish` is always called, so that a display can restore the terminal.
    """

    def prepare(self, what: str) -> None:
        """Describe the work before the total is known. Optional."""
        ...

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Start a job of `total` weights (or other units); an earlier run finished `done` of them."""
        ...

    def stage(self, name: str) -> None:
        """Name the current stage, for example a layer."""
        ...

    def advance(self, count: int, memory: int) -> None:
        """Add `count` finished units. `memory` is the peak anonymous memory so far, in bytes."""
        ...

    def traffic(self, received: int, left: int, disk: int) -> None:
        """Report a download: bytes received by this run, bytes left, and bytes of the source on disk. Optional."""
        ...

    def finish(self) -> None:
        """End the display."""
        ...


class Silent:
    """Shows nothing."""

    def prepare(self, what: str) -> None:
        """Ignore the preparation."""

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Ignore the start."""

    def stage(self, name: str) -> None:
        """Ignore the stage."""

    def advance(self, count: int, memory: int) -> None:
        """Ignore the advance."""

    def traffic(self, received: int, left: int, disk: int) -> None:
        """Ignore the download."""

    def finish(self) -> None:
        """Ignore the end."""
