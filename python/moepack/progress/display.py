"""Progress displays for a terminal (a rich bar) and for a log (a plain line every few seconds)."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from moepack.progress.base import Progress as Target
from moepack.progress.base import Silent
from moepack.units import size, speed

LINE_INTERVAL = 5.0
"""Seconds between two lines of the same stage."""


class _Clock:
    """Counts finished units and the seconds since `start`. Units of an earlier run do not count for the speed."""

    def __init__(self) -> None:
        self.start(0, 0, "")

    def start(self, total: int, done: int, unit: str) -> None:
        self.total, self.done, self.fresh, self.unit = total, done, 0, unit
        self.began = time.perf_counter()

    def advance(self, count: int) -> None:
        self.done += count
        self.fresh += count

    def rate(self) -> float:
        return self.fresh / max(time.perf_counter() - self.began, 1e-9)

    def speed(self) -> str:
        return speed(self.rate(), self.unit)

    def remaining(self) -> float | None:
        return (self.total - self.done) / self.rate() if self.fresh else None


class Bar:
    """A bar with layer, speed, time left and peak memory, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._clock = _Clock()
        columns = (
            TextColumn("{task.description}", markup=False),  # names of layers and tensors may contain brackets
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("peak {task.fields[memory]}"),
            TextColumn("{task.fields[download]}"),
        )
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = TaskID(0)

    def prepare(self, what: str) -> None:
        """Print a permanent line."""
        self._console.print(what, highlight=False, markup=False)

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Draw the bar."""
        self._clock.start(total, done, unit)
        self._task = self._progress.add_task("", total=total, completed=done, speed="", memory="", download="")
        self._progress.start()

    def stage(self, name: str) -> None:
        """Show the stage's name before the bar."""
        self._progress.update(self._task, description=name)

    def advance(self, count: int, memory: int) -> None:
        """Move the bar."""
        self._clock.advance(count)
        self._progress.update(self._task, advance=count, speed=self._clock.speed(), memory=size(memory))

    def traffic(self, received: int, left: int, disk: int) -> None:
        """Show the download after the bar."""
        if self._progress.tasks:
            self._progress.update(self._task, download=_download(self._clock, received, left, disk))

    def finish(self) -> None:
        """Remove the bar."""
        self._progress.stop()
        self._progress.remove_task(self._task)


class Lines:
    """Prints one line per stage, and one every `LINE_INTERVAL` seconds within it."""

    def __init__(self, console: Console, interval: float = LINE_INTERVAL) -> None:
        self._console, self._interval = console, interval
        self._clock, self._stage, self._memory, self._last = _Clock(), "", 0, 0.0
        self._download = ""

    def prepare(self, what: str) -> None:
        """Print a line."""
        self._print(what)

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        """Print the total."""
        self._clock.start(total, done, unit)
        resumed = f", {done / total:.0%} done by an earlier run" if done else ""
        self._print(f"{total:,} {unit}{resumed}")

    def stage(self, name: str) -> None:
        """Print the current stage."""
        self._stage = name
        self._line()

    def advance(self, count: int, memory: int) -> None:
        """Print a line if the last one is older than the interval."""
        self._clock.advance(count)
        self._memory = memory
        if time.perf_counter() - self._last >= self._interval:
            self._line()

    def traffic(self, received: int, left: int, disk: int) -> None:
        """Print a line if the last one is older than the interval."""
        self._download = _download(self._clock, received, left, disk)
        if time.perf_counter() - self._last >= self._interval:
            self._line()

    def finish(self) -> None:
        """Do nothing."""

    def _line(self) -> None:
        clock = self._clock
        parts = [f"{clock.done / max(clock.total, 1):4.0%}", self._stage]
        left = clock.remaining()
        if left is not None:
            parts += [clock.speed(), f"{left:.0f} s left", f"peak {size(self._memory)}"]
        self._print("  ".join([*parts, *([self._download] if self._download else [])]))
        self._last = time.perf_counter()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _download(clock: _Clock, received: int, left: int, disk: int) -> str:
    """Describe the download of the source: what is left, its mean speed in this run, and what it takes on disk."""
    rate = received / max(time.perf_counter() - clock.began, 1e-9)
    return f"source: {size(left)} to download, {size(rate)}/s, {size(disk)} on disk"


def terminal_progress(console: Console, quiet: bool = False) -> Target:
    """Return a bar if `console` is a terminal, plain lines otherwise, or a silent display if `quiet`."""
    if quiet:
        return Silent()
    return Bar(console) if console.is_terminal else Lines(console)
