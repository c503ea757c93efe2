"""Cut a stack of matrices into runs of rows, so that temporaries stay small whatever the tensor's size."""

from collections.abc import Iterator

import numpy as np

__all__ = ["row_chunks"]

_CHUNK = 1 << 19
"""Elements handled at a time: float32 temporaries of this size take 2 MB each and stay in the caches."""


def row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
    """The matrix and the rows of each run of a tensor of shape `[..., R, C]`; no run for an empty tensor.

    A run lies in one matrix, so that indexing never copies a view whose matrices do not follow each other in memory.
    """
    *stack, rows, columns = shape
    if columns == 0:
        return
    step = max(1, _CHUNK // columns)
    for matrix in np.ndindex(*stack):
        for start in range(0, rows, step):
            yield matrix, slice(start, min(start + step, rows))
