"""Products with group-wise integers on a GPU, with and without low-rank factors: launches of `cuda/groupwise.cu`.

Weights are decoded exactly. Activations are rounded to f16 with a power-of-two scale for each token and 128 columns,
which preserves bfloat16 and float16 exactly and 11 bits of float32. Sums are float32.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu import groupwise_linear, linear
from moepack.backends.gpu.layer import (
    BLOCK_ROWS,
    CHUNK,
    RESIDENT,
    THREADS,
    TOKENS,
    Blocks,
    Device,
    Grouped,
    LayerKernels,
    device_of,
)
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.structs import Struct, StructValue

__all__ = ["KERNELS", "GroupwiseKernels"]

_GROUPS = (16, 32, 64, 128, 256)
_FACTORS = Struct("common/factors.cuh", "Factors")
_MATRIX, _COMPENSATED = (
    Struct("groupwise.cuh", "Groupwise::Matrix", {"RANK_BITS": bits}, Factors=_FACTORS) for bits in (0, 1)
)
_LINEAR = linear.arguments(_MATRIX)
_FEW = 4
"""The most tokens of a linear layer that single warps multiply on GPUs with warpgroups."""

_HEADER = 128
"""Bytes before the blocks of a group-wise tensor."""


class GroupwiseKernels(LayerKernels):
    """Kernels of `groupwise` and `compensated`. Tables of a compensated matrix:

    - `starts`, int32 [E + 1]: the first row of each expert in either factor;
    - `most`, int64 on the CPU: the largest rank.

    V x uses memory from torch's allocator and a separate launch.
    """

    def tile_tokens(self, slots: int, tokens: int, device: Device) -> int:
        """See `LayerKernels.tile_tokens`; linear layers with more than four tokens use warpgroups."""
        few = _FEW if device.has_warpgroups and slots == tokens else TOKENS[0]
        return TOKENS[0] if tokens <= few else TOKENS[-1]

    def lays_out(self, most: int, device: Device) -> bool:
        """See `LayerKernels.lays_out`; blocks prepare the cells of warpgroups faster than a separate launch."""
        return most == TOKENS[0] or not device.has_warpgroups

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        if matrix.kind == "compensated":
            offset, size = matrix.sections["ranks"]
            ranks = matrix.data[offset : offset + size].cpu().view(torch.int32)
            starts = torch.zeros(len(ranks) + 1, dtype=torch.int32)
            starts[1:] = ranks.cumsum(0)
            matrix.tables["starts"] = starts.to(matrix.device)
            matrix.tables["most"] = ranks.max() if len(ranks) else torch.zeros(())
        super().prepare(matrix)

    def programs(self, matrix: DeviceMatrix) -> list[Program]:
        """See `LayerKernels.programs`."""
        linear = [self._linear(matrix)] if matrix.shape[0] == 1 and self._has_linear(matrix) else []
        return super().programs(matrix) + linear

    def specification(self, matrix: DeviceMatrix) -> tuple[int, int, bool, bool, int]:
        """Bits, group size (0: the whole row), symmetry, whether parameters are float16, bits of factors (0: none)."""
        details = matrix.details
        group = details["group_size"] if details["group_size"] in _GROUPS else 0
        return details["bits"], group, details["symmetric"], details["dtype"] == "float16", details.get("rank_bits", 0)

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`; uses memory from torch's allocator."""
        many = len(x) > linear.COLUMNS[-1] or not self._has_linear(matrix)
        if many or len(x) < groupwise_linear.pays_from(matrix):
            super().linear(matrix, x, out)
        else:
            kernels, gpu = self._linear(matrix), device_of(matrix.data)
            linear.launch(kernels, matrix, _LINEAR, self.struct(matrix), self._tile_bytes(matrix), x, out, gpu)

    def linear_calls(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.linear_calls`."""
        return linear.calls(matrix, 3 if matrix.details["bits"] == 8 else 4) if self._has_linear(matrix) else 1

    def grouped(self, matrix: DeviceMatrix) -> Grouped | None:
        """See `LayerKernels.grouped`."""
        if matrix.kind != "groupwise":
            return None
        program = groupwise_linear.grouped_program(*self.specification(matrix)[:4])
        return Grouped(program, self.struct(matrix), self._tile_bytes(matrix))

    def blocks(self, tokens: int) -> Blocks:
        """One large block for large tiles: its warps share the activations of more rows."""
        return Blocks() if tokens == TOKENS[0] else Blocks(16, 1)

    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """See `LayerKernels.program`."""
        return _compiled(*self.specification(matrix), tokens)

    def struct(self, matrix: DeviceMatrix) -> StructValue:
        """The kernels' `Groupwise::Matrix` structure, without V x."""
        (data, block_bytes), (_, rows, columns) = self._base(matrix), matrix.shape
        if matrix.kind != "compensated":
            return _MATRIX(data=data, block_bytes=block_bytes)
        sides = {name: matrix.pointer(name) for name in ("right_scales", "left_scales", "right", "left")}
        factors = _FACTORS(
            starts=matrix.tables["starts"], **sides, product=None,
            most=int(matrix.tables["most"]), columns=columns, rows=rows,
        )  # fmt: skip
        return _COMPENSATED(data=data, block_bytes=block_bytes, factors=factors)

    def launched(self, matrix: DeviceMatrix, problem: StructValue, shared: int) -> tuple[StructValue, Tensor | None]:
        """Multiply by V; see `LayerKernels.launched`."""
        struct = self.struct(matrix)
        if matrix.kind != "compensated":
            return struct, None
        tokens, most = int(problem["tokens"][0]), int(matrix.tables["most"])
        slots = tokens * int(problem["top_k"]["by"][0])
        product = torch.empty((slots, max(most, 1)), dtype=torch.float32, device=matrix.device)
        struct["factors"]["product"] = product.data_ptr()
        program = self.program(matrix, self.tile_tokens(slots, tokens, device_of(product)))
        grid = max(1, min(slots * most, 2 * RESIDENT * device_of(product).processors))
        program.launch("multiply_by_right", grid, THREADS, [problem, struct["factors"].copy(), shared], early=True)
        return struct, product

    def cell_bytes(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.cell_bytes`."""
        _, group, symmetric, *_ = self.specification(matrix)
        return 2 * CHUNK + 16 * -(-(1 + _sums(group, symmetric)) // 4)

    def ring_bytes(self, matrix: DeviceMatrix) -> int:
        """See `LayerKernels.ring_bytes`; a chunk has at most 512 bytes of parameters."""
        return max(4608, 3 * (CHUNK // 32 * 64 * self.specification(matrix)[0] + 512))

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        blocks = -(-rows // BLOCK_ROWS)
        items = len(out) * blocks * BLOCK_ROWS * -(-columns // 32)
        if not items:
            return
        grid = min(-(-items // THREADS), 16 * device_of(out).processors)
        arguments: list[Argument] = [
            self.struct(matrix), np.int64(first * blocks), np.int64(len(out) * blocks), rows, columns,
            int(out.dtype is torch.float32), out,
        ]  # fmt: skip
        self.program(matrix, TOKENS[0]).launch("dequantize", grid, THREADS, arguments)

    def _has_linear(self, matrix: DeviceMatrix) -> bool:
        return matrix.kind == "groupwise" and device_of(matrix.data).has_warpgroups

    def _tile_bytes(self, matrix: DeviceMatrix) -> int:
        """Bytes of a token's chunk for products of tiles of rows (`cell_bytes` in common/tiles.cuh)."""
        _, group, symmetric, *_ = self.specification(matrix)
        return 2 * CHUNK + 4 * _sums(group, symmetric)

    def _linear(self, matrix: DeviceMatrix) -> Program:
        return groupwise_linear.program(*self.specification(matrix)[:4])

    def _base(self, matrix: DeviceMatrix) -> tuple[int, int]:
        """The address of the first block of rows, and the bytes per block."""
        experts, rows, _ = matrix.shape
        section, header = ("base", _HEADER) if matrix.kind == "compensated" else ("blocks", 0)
        size = (matrix.sections[section][1] - header) // max(experts * -(-rows // BLOCK_ROWS), 1)
        return matrix.pointer(section) + header, size


KERNELS = GroupwiseKernels()


@cache
def _compiled(bits: int, group: int, symmetric: bool, halves: bool, rank_bits: int, tokens: int) -> Program:
    return Program(
        "groupwise.cu", BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves), TOKENS=tokens,
        RESIDENT=KERNELS.blocks(tokens).resident, BLOCK_WARPS=KERNELS.blocks(tokens).warps, RANK_BITS=rank_bits,
    )  # fmt: skip


def _sums(group: int, symmetric: bool) -> int:
    """Activation sums that cells hold per chunk: one for each group with an offset (SUMS in the kernels)."""
    return 0 if symmetric else CHUNK // min(group or CHUNK, CHUNK)
