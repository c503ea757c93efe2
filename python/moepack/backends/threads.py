"""The number of threads used for products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moepack import _core

__all__ = ["one_thread", "set_threads"]


def set_threads(threads: int) -> None:
    """Set the number of threads of packed kernels and of torch for the process.

    Raises:
        ValueError: `threads` is less than 1.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    _core.set_threads(threads)
    torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operators of the calling thread in one thread temporarily.

    For vectors of a vocabulary, torch wakes other threads above 32,768 elements. On a busy machine it then waits for
    them for milliseconds, for work of 10 us. Switching takes 0.2 us.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
