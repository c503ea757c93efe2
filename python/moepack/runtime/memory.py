"""How much memory this process holds, from Linux's `/proc`; zeros where that does not exist."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessMemory", "process_memory"]

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
    """Read the counters of the current process."""
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
