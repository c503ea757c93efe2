"""The interface between a job and whoever shows its progress."""

from typing import Protocol


class Progress(Protocol):
    """Receives a job's progress. Calls come from one thread: `start`, then any of the others, and `finish` at the end.

    `finish` is called however the job ends, so a display can give the terminal back.
    """

    def start(self, weights: int, done: int) -> None:
        """Begin a job of `weights` weights, of which `done` were finished by an earlier run."""
        ...

    def stage(self, name: str) -> None:
        """Say what is being worked on now, for example a layer's name."""
        ...

    def advance(self, weights: int, memory: int) -> None:
        """Count `weights` more weights as done; `memory` is the peak of anonymous memory so far, in bytes."""
        ...

    def finish(self) -> None:
        """End the display."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, weights: int, done: int) -> None:
        """Ignore the beginning."""

    def stage(self, name: str) -> None:
        """Ignore the stage."""

    def advance(self, weights: int, memory: int) -> None:
        """Ignore the advance."""

    def finish(self) -> None:
        """Ignore the end."""
