"""Products by codebook weights on a GPU: launches of `cuda/codebook.cu`.

Tensors that were made for rounded activations, or store turned weights, have their tokens prepared by another launch.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from moepack.runtime.backends.gpu.layer import (
    BLOCK_ROWS,
    CHUNK,
    RESIDENT,
    TOKENS,
    TYPES,
    LayerKernels,
    Struct,
    device_of,
)
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Argument, Program

__all__ = ["KERNELS", "CodebookKernels"]

_MATRIX = np.dtype(
    [("data", np.uint64), ("panel_bytes", np.int64), ("block_bytes", np.int32), ("reciprocal", np.int32)]
)
_ACTIVATIONS = np.dtype([("data", np.uint64), ("type", np.int32), ("columns", np.int32)])
_ROW_THREADS = 512
"""Of the kernels that have a block for each row."""

_TURNED = 32768
"""Most columns that a block turns at a time."""


class CodebookKernels(LayerKernels):
    """Kernels of `codebook`."""

    lays_out = True

    def cell_bytes(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.cell_bytes`."""
        return 272

    def specification(self, matrix: DeviceMatrix) -> tuple[int, int, int, int]:
        """Bits of codes, bytes of a centroid; bits of activations and columns turned together."""
        details = matrix.details
        rounded = details["activation_bits"]
        return details["bits"], 1 if rounded else 2, rounded, details["hadamard"]

    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """See `LayerKernels.program`."""
        bits, planes, *_ = self.specification(matrix)
        return _compiled(bits, planes, tokens)

    def struct(self, matrix: DeviceMatrix) -> Struct:
        """The kernels' `Codebook::Matrix`."""
        experts, rows, columns = matrix.shape
        bits, planes, *_ = self.specification(matrix)
        size = matrix.sections["panels"][1] // max(experts * -(-rows // BLOCK_ROWS), 1)
        chunks = matrix.details["block_size"] // CHUNK
        whole = chunks >= -(-columns // CHUNK)
        block = BLOCK_ROWS * (4 + planes * ((1 << bits) + 4) + chunks * CHUNK // 8 * bits)
        return np.array(
            [(matrix.pointer("panels"), size, *((0, 0) if whole else (block, -(-(1 << 20) // chunks))))], _MATRIX
        )

    def activations(self, matrix: DeviceMatrix, x: Tensor) -> Tensor:
        """Tokens turned and rounded, float32; x itself where the tensor wants neither."""
        *_, bits, turned = self.specification(matrix)
        if not bits and turned == 1:
            return x
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        tokens = np.array([(x.data_ptr(), TYPES[x.dtype], x.shape[1])], _ACTIVATIONS)
        arguments: list[Argument] = [tokens, turned, bits, out]
        program = self.program(matrix, TOKENS[0])
        program.launch("prepare_tokens", len(x), _ROW_THREADS, arguments, _turned_bytes(turned))
        return out

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        turned = matrix.details["hadamard"]
        count = len(out) * rows
        if not count * columns:
            return
        grid = min(count, 16 * device_of(out).processors)
        arguments: list[Argument] = [
            self.struct(matrix), np.int64(first * rows), np.int64(count), rows, columns, turned, out,
        ]  # fmt: skip
        self.program(matrix, TOKENS[0]).launch("dequantize", grid, _ROW_THREADS, arguments, _turned_bytes(turned))


KERNELS = CodebookKernels()


def _turned_bytes(turned: int) -> int:
    return 4 * min(turned, _TURNED) if turned > 1 else 0


@cache
def _compiled(bits: int, planes: int, tokens: int) -> Program:
    return Program(
        "codebook.cu", BITS=bits, PLANES=planes, TOKENS=tokens, RESIDENT=RESIDENT if tokens == TOKENS[0] else 1
    )
