"""The number of threads used for products."""

import torch

from moepack import _core

__all__ = ["set_threads"]


def set_threads(threads: int) -> None:
    """Set the number of threads of packed kernels and of torch for the process.

    Raises:
        ValueError: `threads` is less than 1.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    _core.set_threads(threads)
    torch.set_num_threads(threads)
