"""Measures memory use, and adapts the garbage collector.

Anonymous memory is the relevant figure: pages of mapped weights belong to the page cache and are released when another
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
    """Return the current anonymous memory of this process in bytes (Linux: `RssAnon`).

    On other systems, return the peak resident size, which is larger because it includes mapped files.
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
    """Disable the garbage collector in the block.

    Code that creates many permanent objects, such as imports, would otherwise spend a third of its time in repeated
    collections.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def present_exempted() -> Iterator[None]:
    """Exempt all present objects from garbage collection in the block.

    A loaded model and its libraries are 500,000 objects. A full collection visits all of them (0.9 s on a busy Zen 5
    core), and Python postpones it until a quarter as many new objects are pending, with the buffers that they hold.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def available_bytes() -> int | None:
    """Return the memory available to this process in bytes: the minimum over the system and its control groups.

    The page cache counts as available. Return None if Linux's `/proc/meminfo` does not exist.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([system, *_group_limits()])


def total_bytes() -> int | None:
    """Return the total memory in bytes: the minimum over this machine and the process's control groups.

    Return None if Linux's `/proc/meminfo` does not exist.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        system = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration):
        return None
    return min([system, *(limit for limit, _ in _groups())])


def _group_limits(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the available bytes in each control group of this process that has a limit."""
    for limit, group in _groups(root):
        with suppress(OSError, ValueError):
            used = int((group / "memory.current").read_text())
            statistics = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for name, value in statistics if name in ("active_file", "inactive_file"))
            yield max(0, limit - used + cached)


def _groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, Path]]:
    """Yield limit and directory of each control group (version 2) of this process that has a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (root / path, *(root / path).parents):
        if not group.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # no version 2 group, or "max": no limit
            yield int((group / "memory.max").read_text()), group


class PeakMemory:
    """The peak anonymous memory over all calls of `sample`, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sample()

    def sample(self) -> int:
        """Sample the memory; return the peak so far."""
        self.bytes = max(self.bytes, anonymous_bytes())
        return self.bytes


_FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped"}


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process in bytes.

    Attributes:
        peak: peak resident size, including mapped files.
        resident: current resident size: the sum of the next two, and a little shared memory.
        anonymous: anonymous pages, which the system cannot drop.
        mapped: pages of mapped files, for example packed weights, which the system can drop.
    """

    peak: int = 0
    resident: int = 0
    anonymous: int = 0
    mapped: int = 0


def process_memory() -> ProcessMemory:
    """Read the counters of the current process from Linux's `/proc`; zeros if it does not exist."""
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
