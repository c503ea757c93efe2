"""Splits a stack of matrices into runs of rows, so that temporaries stay small for any tensor size."""

from collections.abc import Iterator

import numpy as np

__all__ = ["row_chunks"]

_CHUNK = 1 << 19
"""Elements processed at a time: float32 temporaries of this size take 2 MB each and fit into caches."""


def row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
    """Yield the matrix index and the rows of each run of a tensor of shape `[..., R, C]`; nothing for an empty tensor.

    A run lies within one matrix, so indexing never copies a view whose matrices are not contiguous in memory.
    """
    *stack, rows, columns = shape
    if columns == 0:
        return
    step = max(1, _CHUNK // columns)
    for matrix in np.ndindex(*stack):
        for start in range(0, rows, step):
            yield matrix, slice(start, min(start + step, rows))
