"""Products with codebook weights on a GPU: launches of `cuda/codebook.cu`.

For tensors that were quantized for rounded activations or store rotated weights, an extra launch prepares the tokens.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu import linear
from moepack.backends.gpu.layer import (
    BLOCK_ROWS,
    CHUNK,
    TOKENS,
    Blocks,
    Device,
    Grouped,
    LayerKernels,
    device_of,
    padded,
)
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, StructValue, activations

__all__ = ["KERNELS", "CodebookKernels"]

_MATRIX = Struct("codebook.cu", "Codebook::Matrix")
_LINEAR_MATRIX = Struct("codebook_tiles.cuh", "CodebookLinear::Matrix")
_LINEAR = linear.arguments(_LINEAR_MATRIX)
_FEW = Struct("codebook.cu", "Few", Activations=ACTIVATIONS)
_PAYS_FROM = 5
"""The least tokens for which the linear kernels for Hopper are faster than the others, measured on an H100."""

_FEW_TOKENS = 4
"""The most tokens of a linear layer that share a product."""

_FEW_THREADS = 512
"""Threads per block in kernels for few tokens."""

_FEW_CHUNKS = 64
"""Total chunks in all rings of a block."""

_CELL_BYTES = 256
"""Bytes of a token's chunk in shared memory, without its note."""

_ROW_THREADS = 512
"""Threads per block in kernels with one block per row."""

_ROTATED = 32768
"""The most columns that a block rotates at once."""


class CodebookKernels(LayerKernels):
    """Kernels of `codebook`."""

    def lays_out(self, most: int, device: Device) -> bool:
        """See `LayerKernels.lays_out`."""
        return True

    def cell_bytes(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.cell_bytes`."""
        return 272

    def specification(self, matrix: DeviceMatrix) -> tuple[int, int, int, int]:
        """Bits of codes, bytes of a centroid, bits of activations, and columns that are rotated together."""
        details = matrix.details
        rounded = details["activation_bits"]
        return details["bits"], 1 if rounded else 2, rounded, details["hadamard"]

    def blocks(self, tokens: int) -> Blocks:
        """One resident block for large tiles, because of its registers."""
        return Blocks() if tokens == TOKENS[0] else Blocks(resident=1)

    def programs(self, matrix: DeviceMatrix) -> list[Program]:
        """See `LayerKernels.programs`."""
        linear = [self._linear(matrix)] if matrix.shape[0] == 1 and self._has_linear(matrix) else []
        return super().programs(matrix) + linear

    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """See `LayerKernels.program`."""
        bits, planes, *_ = self.specification(matrix)
        return _compiled(bits, planes, tokens)

    def struct(self, matrix: DeviceMatrix) -> StructValue:
        """The kernels' `Codebook::Matrix` structure."""
        chunks = matrix.details["block_size"] // CHUNK
        reciprocal = 0 if chunks >= -(-matrix.shape[2] // CHUNK) else -(-(1 << 20) // chunks)
        data, panel_bytes = self._base(matrix)
        return _MATRIX(data=data, panel_bytes=panel_bytes, block_chunks=chunks, reciprocal=reciprocal)

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`; uses memory from torch's allocator."""
        if _PAYS_FROM <= len(x) <= linear.COLUMNS[-1] and self._has_linear(matrix):
            x, steps = self.scaled(matrix, x)
            kernels, gpu = self._linear(matrix), device_of(matrix.data)
            linear.launch(kernels, matrix, _LINEAR, self._tiles(matrix), 2 * CHUNK, x, out, gpu, steps)
        elif len(x) <= _FEW_TOKENS and _few_bytes(matrix, 1, len(x)):
            self._few("combine_few", [matrix], x, None, None, out)
        else:
            super().linear(matrix, x, out)

    def linear_calls(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.linear_calls`."""
        return linear.calls(matrix, 3) if self._has_linear(matrix) else 1

    def grouped(self, matrix: DeviceMatrix) -> Grouped | None:
        """See `LayerKernels.grouped`."""
        if not self._has_linear(matrix):
            return None
        bits, planes, *_ = self.specification(matrix)
        return Grouped(_compiled_grouped(bits, planes), self._tiles(matrix), 2 * CHUNK)

    def scaled(self, matrix: DeviceMatrix, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `LayerKernels.scaled`; rounded activations become integers in units of their steps."""
        rounded = matrix.details["activation_bits"]
        steps = torch.empty(len(x), dtype=torch.float32, device=x.device) if rounded else None
        return self.activations(matrix, x, steps), steps

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `LayerKernels.gated`."""
        if len(x) == 1 and self.specification(gate) == self.specification(up) and _few_bytes(gate, index.numel(), 1):
            self._few("gated_few", [gate, up], x, index, None, hidden)
        else:
            super().gated(gate, up, x, index, hidden)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `LayerKernels.combine`."""
        if len(out) == 1 and _few_bytes(down, index.numel(), 1):
            self._few("combine_few", [down], hidden, index, weights, out)
        else:
            super().combine(down, hidden, index, weights, out)

    def _few(
        self,
        kernel: str,
        matrices: list[DeviceMatrix],
        x: Tensor,
        index: Tensor | None,
        weights: Tensor | None,
        out: Tensor,
    ) -> None:
        """Launch a kernel for few tokens: one token with its experts, or the tokens of a linear layer."""
        first = matrices[0]
        experts, rows, columns = first.shape
        x = padded(self.activations(first, x))
        slots, tokens = (1, len(x)) if index is None else (index.numel(), 1)
        chunks = -(-columns // CHUNK)
        problem = _FEW(
            x=activations(x), index=index, weights=weights, out=out, slots=slots, tokens=tokens, experts=experts,
            rows=rows, chunks=chunks, by_chunks=-(-(1 << 20) // chunks),
        )  # fmt: skip
        units = -(-rows // BLOCK_ROWS) * (slots if kernel == "gated_few" else 1)
        grid = min(units, device_of(out).processors)
        arguments = [problem, *map(self.struct, matrices)]
        shared = _few_bytes(first, slots, tokens)
        self.program(first, TOKENS[0]).launch(kernel, grid, _FEW_THREADS, arguments, shared, early=True)

    def activations(self, matrix: DeviceMatrix, x: Tensor, steps: Tensor | None = None) -> Tensor:
        """Rotate and round tokens to float32 with zero padding; return x itself if the tensor needs neither.

        Args:
            matrix: specifies rotation and rounding.
            x: [N, C].
            steps: [N], written; rounded tokens are then integers in units of these steps.
        """
        *_, bits, rotated = self.specification(matrix)
        if not bits and rotated == 1:
            return x
        x = padded(x) if rotated == 1 else x
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        arguments: list[Argument] = [activations(x), rotated, bits, out, steps]
        program = self.program(matrix, TOKENS[0])
        program.launch("prepare_tokens", len(x), _ROW_THREADS, arguments, _rotated_bytes(rotated), early=True)
        return out

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        rotated = matrix.details["hadamard"]
        count = len(out) * rows
        if not count * columns:
            return
        grid = min(count, 16 * device_of(out).processors)
        arguments: list[Argument] = [
            self.struct(matrix), np.int64(first * rows), np.int64(count), rows, columns, rotated,
            int(out.dtype is torch.float32), out,
        ]  # fmt: skip
        self.program(matrix, TOKENS[0]).launch("dequantize", grid, _ROW_THREADS, arguments, _rotated_bytes(rotated))

    def _has_linear(self, matrix: DeviceMatrix) -> bool:
        """Whether linear layers have their own kernels: for 4 bits, with one codebook per row."""
        one_block = matrix.details["block_size"] >= matrix.shape[2]
        return matrix.details["bits"] == 4 and one_block and device_of(matrix.data).has_warpgroups

    def _linear(self, matrix: DeviceMatrix) -> Program:
        bits, planes, *_ = self.specification(matrix)
        return _compiled_linear(bits, planes)

    def _tiles(self, matrix: DeviceMatrix) -> StructValue:
        """The kernels' `CodebookLinear::Matrix` structure."""
        data, panel_bytes = self._base(matrix)
        return _LINEAR_MATRIX(data=data, block_bytes=panel_bytes)

    def _base(self, matrix: DeviceMatrix) -> tuple[int, int]:
        """The address of the first panel, and the bytes per panel."""
        experts, rows, _ = matrix.shape
        size = matrix.sections["panels"][1] // max(experts * -(-rows // BLOCK_ROWS), 1)
        return matrix.pointer("panels"), size


KERNELS = CodebookKernels()


def _few_bytes(matrix: DeviceMatrix, slots: int, tokens: int) -> int:
    """Shared memory of a kernel for few tokens; 0 if it exceeds the limit, or the kernels' division would overflow."""
    chunks = -(-matrix.shape[2] // CHUNK)
    cells, device = slots * tokens * chunks, device_of(matrix.data)
    ring = _FEW_CHUNKS * BLOCK_ROWS * CHUNK // 8 * matrix.details["bits"]
    # Units of a block, for at most gate and up: one slot of sums each, plus one per warp.
    units = -(-(-(-matrix.shape[1] // BLOCK_ROWS) * slots) // device.processors)
    places = 2 * units + _FEW_THREADS // 32
    size = ring + cells * _CELL_BYTES + 16 * -(-cells // 4) + 4 * places * tokens * BLOCK_ROWS
    return size if size <= device.most_shared and slots * chunks * chunks < 1 << 20 else 0


def _rotated_bytes(rotated: int) -> int:
    return 4 * min(rotated, _ROTATED) if rotated > 1 else 0


@cache
def _compiled(bits: int, planes: int, tokens: int) -> Program:
    return Program("codebook.cu", BITS=bits, PLANES=planes, TOKENS=tokens, RESIDENT=KERNELS.blocks(tokens).resident)


@cache
def _compiled_linear(bits: int, planes: int) -> Program:
    return Program("codebook_linear.cu", BITS=bits, PLANES=planes)


@cache
def _compiled_grouped(bits: int, planes: int) -> Program:
    return Program("codebook_grouped.cu", BITS=bits, PLANES=planes)
