"""Measures memory use, and adapts the garbage collector.

Anonymous memory is the relevant figure: pages of mapped weights belong to the page cache and are released when another
program needs them.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moepack.system.memory import ProcessMemory, available_bytes, process_memory, release_unused, total_bytes

__all__ = [
    "PeakMemory",
    "ProcessMemory",
    "anonymous_bytes",
    "available_bytes",
    "importing",
    "present_exempted",
    "process_memory",
    "release_unused",
    "total_bytes",
    "without_collector",
]

MANY = 500
"""Modules. Torch imports 1,000 and transformers 1,500 more."""


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
def importing() -> Iterator[None]:
    """Import libraries in the block without the garbage collector, and exempt them from it until the process ends.

    For the imports of a command, which has the process for itself. The 450,000 objects of torch and transformers last
    as long as the process. If they were there before the block, nothing is exempted.
    """
    before = len(sys.modules)
    with without_collector():
        yield
        if len(sys.modules) - before >= MANY:
            gc.freeze()
            atexit.register(gc.unfreeze)  # some libraries report what is left after Python's last collection


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
