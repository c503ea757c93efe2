"""Linear layers, and layers of experts with many tokens, of group-wise integers on Hopper: `cuda/groupwise_linear.cu`,
and when to use it, and `cuda/groupwise_grouped.cu`."""

import math
from functools import cache

from moepack.backends.gpu.linear import COLUMNS
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Program

__all__ = ["grouped_program", "pays_from", "program"]

_SMALL, _LARGE = 1 << 22, 1 << 24
"""Matrix sizes in weights: few bits pay off with one token from the first on; other widths pay off with a few tokens
below the second (`pays_from`)."""


def pays_from(matrix: DeviceMatrix) -> int:
    """The least tokens for which these kernels are faster than those of expert layers, measured on an H100.

    Integers of 2 and 3 bits are bound by decoding, which these kernels do with fewer instructions. Other widths decode
    as fast as their bytes arrive, and gain if they would otherwise be decoded twice, for more than 16 tokens. Kernels
    of expert layers need one launch less for a few tokens, and one more for larger numbers.
    """
    weights = math.prod(matrix.shape)
    if matrix.details["bits"] <= 3:
        return 1 if weights >= _SMALL else 5
    return 17 if weights >= _LARGE else 5


@cache
def program(bits: int, group: int, symmetric: bool, halves: bool) -> Program:
    """The kernels of linear layers for a specification (`GroupwiseKernels.specification`)."""
    return _program("groupwise_linear.cu", bits, group, symmetric, halves)


@cache
def grouped_program(bits: int, group: int, symmetric: bool, halves: bool) -> Program:
    """The kernels of layers of experts with many tokens for a specification."""
    return _program("groupwise_grouped.cu", bits, group, symmetric, halves)


def _program(source: str, bits: int, group: int, symmetric: bool, halves: bool) -> Program:
    return Program(
        source, BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves), TOKENS=COLUMNS[-1], RANK_BITS=0
    )
