"""The interface between a job and whoever shows its progress."""

from typing import Protocol


class Progress(Protocol):
    """Receives a job's progress. Calls come from one thread: `prepare`, `start`, then any of the others, and `finish`;
    a job that measures first starts twice.

    `finish` is called however the job ends, so a display can give the terminal back.
    """

    def prepare(self, what: str) -> None:
        """Say what is done before it is known how much there is to do; may be left out."""
        ...

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Begin a job of `total` weights, or what `unit` names, of which `done` were finished by an earlier run."""
        ...

    def stage(self, name: str) -> None:
        """Say what is being worked on now, for example a layer's name."""
        ...

    def advance(self, count: int, memory: int) -> None:
        """Count so many more as done; `memory` is the peak of anonymous memory so far, in bytes."""
        ...

    def finish(self) -> None:
        """End the display."""
        ...


class Silent:
    """Shows nothing."""

    def prepare(self, what: str) -> None:
        """Ignore the preparation."""

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Ignore the beginning."""

    def stage(self, name: str) -> None:
        """Ignore the stage."""

    def advance(self, count: int, memory: int) -> None:
        """Ignore the advance."""

    def finish(self) -> None:
        """Ignore the end."""
