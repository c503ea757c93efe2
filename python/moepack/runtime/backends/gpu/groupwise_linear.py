"""Linear layers of group-wise integers on Hopper: `cuda/groupwise_linear.cu`, and when they pay."""

import math
from functools import cache

from moepack.runtime.backends.gpu.linear import COLUMNS
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Program

__all__ = ["pays_from", "program"]

_SMALL, _LARGE = 1 << 22, 1 << 24
"""Weights of a matrix from which few bits pay with one token, and to which others pay with a few (`pays_from`)."""


def pays_from(matrix: DeviceMatrix) -> int:
    """The least tokens of which these kernels multiply faster than those of layers of experts do, measured on an H100.

    Decoding bounds integers of 2 and 3 bits, and is what these kernels do with fewer instructions. Others decode as
    fast as their bytes come, and gain where they would be decoded twice, for more than 16 tokens. Layers of experts
    take a launch less for a few tokens, one more for the others.
    """
    weights = math.prod(matrix.shape)
    if matrix.details["bits"] <= 3:
        return 1 if weights >= _SMALL else 5
    return 17 if weights >= _LARGE else 5


@cache
def program(bits: int, group: int, symmetric: bool, halves: bool) -> Program:
    """The kernels of a specification (`GroupwiseKernels.specification`)."""
    return Program(
        "groupwise_linear.cu", BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves),
        TOKENS=COLUMNS[-1], RANK_BITS=0,
    )  # fmt: skip
