"""Cases of coded integers: 2, 3 and 4 bits, streams of either height, many tables, many exceptions, dependent codes."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from moepack import _core

STEPS = {2: 1.0, 3: 0.49, 4: 0.2425}
"""Steps in standard deviations, by the entropy of Gaussian codes in bits."""


def make(
    experts: int,
    rows: int,
    columns: int,
    seed: int,
    *,
    bits: int,
    stream_rows: int | None = None,
    spread: float = 0.0,
    outliers: float = 0.0,
    dependent: bool = False,
) -> NDArray[np.uint8]:
    """A packed tensor of Gaussian codes; above 2^22, they repeat.

    Args:
        experts: of the tensor.
        rows: of an expert.
        columns: of a row.
        seed: of the codes.
        bits: their entropy.
        stream_rows: rows of a stream.
        spread: standard deviation of the logarithm of the rows' deviations.
        outliers: share of codes that are large.
        dependent: these are the indices of the codes.
    """
    random = np.random.default_rng(seed)
    count = min(experts * rows, max(64, (1 << 22) // columns))
    deviations = np.exp(spread * random.standard_normal((count, 1))) / STEPS[bits]
    codes = np.rint(random.standard_normal((count, columns)) * deviations)
    codes = np.where(random.random(codes.shape) < outliers, 40 * codes, codes).astype(np.int16)
    codes = paths(codes) if dependent else codes
    scales = (1 + random.random((experts, rows))).astype(np.float32) * STEPS[bits] * columns**-0.5
    scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    repeated = codes[np.arange(experts * rows) % count].reshape(experts, rows, columns)
    symbols = "dependent" if dependent else "plain"
    return _core.encode_coded(repeated, scales, ndim=3, stream_rows=stream_rows, symbols=symbols)


def paths(indices: NDArray[np.int16]) -> NDArray[np.int16]:
    """The dependent codes [R, C] of indices (docs/format.md, section 9)."""
    after_even = np.array([0, 5, 1, 6, 2, 4, 3, 7])
    codes, states = 4 * indices + 1, np.zeros((len(indices), 4), np.intp)
    for column, state in enumerate(np.resize(np.arange(4), indices.shape[1])):
        codes[:, column] *= 1 - 2 * (states[:, state] % 2).astype(np.int16)
        states[:, state] = after_even[states[:, state]] ^ 2 * (indices[:, column] & 1)
    return codes


SPECIFICATIONS = {f"coded {bits} bits": partial(make, bits=bits) for bits in STEPS} | {
    "coded streams of 16 rows": partial(make, bits=3, stream_rows=16),
    "coded uneven rows": partial(make, bits=3, spread=0.5),
    "coded outliers": partial(make, bits=2, outliers=0.02),
    "coded 3 bits, dependent": partial(make, bits=3, dependent=True),
}
