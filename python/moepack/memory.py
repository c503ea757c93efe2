"""How much memory this process uses.

Anonymous memory is what counts: pages of mapped weights belong to the page cache and are given back when another
program needs them.
"""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory that this process holds now (Linux: `RssAnon`).

    Elsewhere the peak resident size stands in for it: larger, because it counts mapped files.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            line = next(line for line in status if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python from looking for cyclic garbage: what makes many objects that all stay, as importing does, would be
    looked through again and again, a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def available_bytes() -> int | None:
    """Return how many bytes the process can still take: the least that the system and its control groups leave it.

    Page cache counts as available. None where Linux's `/proc/meminfo` does not exist.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([system, *_group_limits()])


def total_bytes() -> int | None:
    """Return the bytes of memory of this machine, or of the control groups that this process is in, if those have less.

    None where Linux's `/proc/meminfo` does not exist.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration):
        return None
    return min([system, *(limit for limit, _ in _groups())])


def _group_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group that this process is in leaves it, where the group has a limit."""
    for limit, group in _groups(root):
        with suppress(OSError, ValueError):
            used = int((group / "memory.current").read_text())
            statistics = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for name, value in statistics if name in ("active_file", "inactive_file"))
            yield max(0, limit - used + cached)


def _groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, Path]]:
    """The limit of each control group (version 2) that this process is in and that has one, and its directory."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (root / path, *(root / path).parents):
        if not group.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # no group of version 2, or "max": none with a limit
            yield int((group / "memory.max").read_text()), group


class PeakMemory:
    """The largest anonymous memory seen at the moments when `sample` was called, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sample()

    def sample(self) -> int:
        """Look now; return the peak so far."""
        self.bytes = max(self.bytes, anonymous_bytes())
        return self.bytes


_FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped"}


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of memory.

    Attributes:
        peak: the most that was ever resident, mapped files included.
        resident: resident now; the sum of the next two, and a little shared memory.
        anonymous: the process's own pages, which the system cannot drop.
        mapped: pages of files, for example packed weights, which it can.
    """

    peak: int = 0
    resident: int = 0
    anonymous: int = 0
    mapped: int = 0


def process_memory() -> ProcessMemory:
    """Read the counters of the current process from Linux's `/proc`; zeros where that does not exist."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return ProcessMemory()
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(value.split()[0]) << 10
    return ProcessMemory(**found)
