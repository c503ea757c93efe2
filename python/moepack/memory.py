"""Measures memory use, and adapts the garbage collector.

Anonymous memory is the relevant figure: pages of mapped weights belong to the page cache and are released when another
program needs them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from moepack.system.memory import ProcessMemory, available_bytes, process_memory, release_unused, total_bytes

__all__ = [
    "PeakMemory",
    "ProcessMemory",
    "anonymous_bytes",
    "available_bytes",
    "present_exempted",
    "process_memory",
    "release_unused",
    "total_bytes",
    "without_collector",
]


def anonymous_bytes() -> int:
    """Return the current anonymous memory of this process in bytes; 0 if the system cannot tell."""
    return process_memory().anonymous


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


class PeakMemory:
    """The peak anonymous memory over all calls of `sample`, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.sample()

    def sample(self) -> int:
        """Sample the memory; return the peak so far."""
        self.bytes = max(self.bytes, anonymous_bytes())
        return self.bytes
