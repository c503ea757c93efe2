"""How much memory this process uses.

Anonymous memory is what counts: pages of mapped weights belong to the page cache and are given back when another
program needs them.
"""

import resource
import sys


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


class PeakMemory:
    """The largest anonymous memory seen at the moments when `sample` was called, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sample()

    def sample(self) -> int:
        """Look now; return the peak so far."""
        self.bytes = max(self.bytes, anonymous_bytes())
        return self.bytes
