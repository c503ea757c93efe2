"""Products by group-wise integers on a GPU: launches of `cuda/groupwise.cu`.

Weights are decoded exactly; activations are rounded to f16 under a power of two for each token and 128 columns, which
keeps bfloat16 and float16 as they are and 11 bits of float32; sums are float32.
"""

from functools import cache

import numpy as np
from torch import Tensor

from moepack.runtime.backends.gpu.layer import (
    BLOCK_ROWS,
    CHUNK,
    RESIDENT,
    THREADS,
    TOKENS,
    LayerKernels,
    Struct,
    device_of,
)
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Argument, Program

__all__ = ["KERNELS", "GroupwiseKernels"]

_GROUPS = (16, 32, 64, 128, 256)
_MATRIX = np.dtype([("data", np.uint64), ("block_bytes", np.int64)])


class GroupwiseKernels(LayerKernels):
    """Kernels of `groupwise`."""

    lays_out = True

    def specification(self, matrix: DeviceMatrix) -> tuple[int, int, bool, bool]:
        """Bits, group size (0: the whole row), symmetry, and whether parameters are float16."""
        details = matrix.details
        group = details["group_size"] if details["group_size"] in _GROUPS else 0
        return details["bits"], group, details["symmetric"], details["dtype"] == "float16"

    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """See `LayerKernels.program`."""
        return _compiled(*self.specification(matrix), tokens)

    def struct(self, matrix: DeviceMatrix) -> Struct:
        """The kernels' `Groupwise::Matrix`."""
        experts, rows, _ = matrix.shape
        _, size = matrix.sections["blocks"]
        blocks = experts * -(-rows // BLOCK_ROWS)
        return np.array([(matrix.pointer("blocks"), size // max(blocks, 1))], _MATRIX)

    def cell_bytes(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.cell_bytes`."""
        _, group, symmetric, _ = self.specification(matrix)
        sums = 0 if symmetric else CHUNK // min(group or CHUNK, CHUNK)
        return 2 * CHUNK + 16 * -(-(1 + sums) // 4)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        blocks = -(-rows // BLOCK_ROWS)
        items = len(out) * blocks * BLOCK_ROWS * -(-columns // 32)
        if not items:
            return
        grid = min(-(-items // THREADS), 16 * device_of(out).processors)
        arguments: list[Argument] = [
            self.struct(matrix), np.int64(first * blocks), np.int64(len(out) * blocks), rows, columns, out,
        ]  # fmt: skip
        self.program(matrix, TOKENS[0]).launch("dequantize", grid, THREADS, arguments)


KERNELS = GroupwiseKernels()


@cache
def _compiled(bits: int, group: int, symmetric: bool, halves: bool, tokens: int) -> Program:
    return Program(
        "groupwise.cu", BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves), TOKENS=tokens,
        RESIDENT=RESIDENT,
    )  # fmt: skip
