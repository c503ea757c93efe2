"""Products by group-wise integers on a GPU: launches of `cuda/groupwise.cu`.

Weights are decoded exactly; activations are rounded to f16 under a power of two for each token and 128 columns, which
keeps bfloat16 and float16 as they are and 11 bits of float32; sums are float32.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Argument, Program

__all__ = ["KERNELS", "GroupwiseKernels"]

_THREADS = 256
_BLOCK_ROWS = 16
_CHUNK = 128
_RESIDENT = 2
"""Blocks of an SM at a time, for whose registers and shared memory the kernels are compiled."""

_STATIC_BYTES = 9 << 10
"""Shared memory of a block beside what it is launched with: the routing, and what the driver takes."""

_TOKENS = (8, 32)
"""Most tokens of a tile, the columns of a product: one program each."""

_FEW = 4
"""Most tokens whose activations every block lays out for itself."""

_GROUPS = (16, 32, 64, 128, 256)
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_PROBLEM = np.dtype(
    [("x", np.uint64), ("type", np.int32), ("width", np.int32)]
    + [(name, np.uint64) for name in ("index", "weights", "out", "cells")]
    + [(name, np.int32) for name in ("tokens", "top_k", "experts", "rows", "columns", "row_blocks", "splits", "unused")]
)
_MATRIX = np.dtype([("data", np.uint64), ("block_bytes", np.int64)])

_Struct = NDArray[Any]


class _Device(NamedTuple):
    """What a launch asks of a GPU: its multiprocessors, and the dynamic shared memory of a block of two on one."""

    processors: int
    shared: int


class GroupwiseKernels:
    """Kernels of `groupwise`."""

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        for tokens in _TOKENS:
            _program(matrix, tokens).load()

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        self._combine(matrix, x, None, None, out)

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`; a gate and an up projection of different specifications are two launches."""
        if _specification(gate) == _specification(up):
            self._by_slot("gated", [gate, up], x, index, hidden)
        else:
            self._by_slot("project", [gate], x, index, hidden)
            self._by_slot("multiply", [up], x, index, hidden)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`; where the sum is split over blocks, its parts take memory of torch's allocator."""
        self._combine(down, hidden, index, weights, out)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        blocks = -(-rows // _BLOCK_ROWS)
        items = len(out) * blocks * _BLOCK_ROWS * -(-columns // 32)
        if not items:
            return
        grid = min(-(-items // _THREADS), 16 * _device(out.device.index).processors)
        arguments: list[Argument] = [
            _matrix(matrix), np.int64(first * blocks), np.int64(len(out) * blocks), rows, columns, out,
        ]  # fmt: skip
        _program(matrix, _TOKENS[0]).launch("dequantize", grid, _THREADS, arguments)

    def _by_slot(self, kernel: str, matrices: list[DeviceMatrix], x: Tensor, index: Tensor, out: Tensor) -> None:
        """Launch a kernel that writes a row for each slot."""
        row_blocks = _row_blocks_by_slot(matrices[0], index.numel())
        cells = _lay_out("lay_out_tokens", matrices[0], x, index, None, len(x))
        problem = _problem(matrices[0], x, index, None, out, cells, len(x), row_blocks)
        _launch(kernel, matrices, problem, len(x))

    def _combine(
        self, matrix: DeviceMatrix, x: Tensor, index: Tensor | None, weights: Tensor | None, out: Tensor
    ) -> None:
        """Launch the kernel that sums the outputs of each token."""
        tokens = len(out)
        row_blocks, splits = _division_of_sum(matrix, len(x))
        cells = _lay_out("lay_out_hidden", matrix, x, index, weights, tokens)
        parts = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        problem = _problem(matrix, x, index, weights, parts, cells, tokens, row_blocks, splits)
        _launch("combine", [matrix], problem, tokens)
        if splits > 1:
            torch.sum(parts, 0, out=out)


KERNELS = GroupwiseKernels()


def _specification(matrix: DeviceMatrix) -> tuple[int, int, bool, bool]:
    """Bits, group size (0: the whole row), symmetry, and whether parameters are float16."""
    details = matrix.details
    group = details["group_size"] if details["group_size"] in _GROUPS else 0
    return details["bits"], group, details["symmetric"], details["dtype"] == "float16"


def _program(matrix: DeviceMatrix, tokens: int) -> Program:
    return _compiled(*_specification(matrix), tokens)


@cache
def _compiled(bits: int, group: int, symmetric: bool, halves: bool, tokens: int) -> Program:
    return Program(
        "groupwise.cu", BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves), TOKENS=tokens,
        RESIDENT=_RESIDENT,
    )  # fmt: skip


@cache
def _device(index: int) -> _Device:
    properties = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_multiprocessor // _RESIDENT - _STATIC_BYTES
    return _Device(properties.multi_processor_count, shared // 128 * 128)


def _matrix(matrix: DeviceMatrix) -> _Struct:
    experts, rows, _ = matrix.shape
    _, size = matrix.sections["blocks"]
    blocks = experts * -(-rows // _BLOCK_ROWS)
    return np.array([(matrix.pointer("blocks"), size // max(blocks, 1))], _MATRIX)


def _row_blocks_by_slot(matrix: DeviceMatrix, slots: int) -> int:
    """Blocks of 16 rows of a row tile of a kernel that writes a row for each slot.

    Activations that fit into shared memory are copied once for many row tiles; others are shared by more rows.
    """
    experts, _, columns = matrix.shape
    cells = slots / max(min(slots, experts), 1) * -(-columns // _CHUNK)
    return 1 if cells * _cell_bytes(matrix) <= _device(matrix.device.index).shared // 2 else 4


def _division_of_sum(matrix: DeviceMatrix, slots: int) -> tuple[int, int]:
    """Blocks of 16 rows of a row tile, and parts of the sum over columns, of `combine`."""
    experts, rows, _ = matrix.shape
    mean = slots / max(min(slots, experts), 1)
    row_blocks = next(blocks for most, blocks in ((4, 1), (8, 2), (16, 4), (512, 8)) if mean <= most)
    tiles = -(-rows // (_BLOCK_ROWS * row_blocks))
    splits = max(1, min(8, _RESIDENT * _device(matrix.device.index).processors // tiles))
    return row_blocks, splits if row_blocks > 1 else 1


def _cell_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of the activations of a token and 128 columns, as `cuda/common/tokens.cuh` lays them out."""
    _, group, symmetric, _ = _specification(matrix)
    sums = 0 if symmetric else _CHUNK // min(group or _CHUNK, _CHUNK)
    return 2 * _CHUNK + 16 * -(-(1 + sums) // 4)


def _lay_out(
    kernel: str, matrix: DeviceMatrix, x: Tensor, index: Tensor | None, weights: Tensor | None, tokens: int
) -> Tensor | None:
    """Make the cells of all slots in a launch of its own, where blocks making their own take longer."""
    if tokens <= _FEW:
        return None
    slots = tokens if index is None else index.numel()
    size = slots * -(-matrix.shape[2] // _CHUNK) * _cell_bytes(matrix)
    cells = torch.empty(size, dtype=torch.uint8, device=x.device)
    _launch(kernel, [], _problem(matrix, x, index, weights, None, cells, tokens), tokens, matrix)
    return cells


def _problem(
    matrix: DeviceMatrix,
    x: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
    out: Tensor | None,
    cells: Tensor | None,
    tokens: int,
    row_blocks: int = 1,
    splits: int = 1,
) -> _Struct:
    """The arguments of a launch."""
    experts, rows, columns = matrix.shape
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (index, weights, out, cells)]
    top_k = 1 if index is None else index.shape[1]
    sizes = [tokens, top_k, experts, rows, columns, row_blocks, splits, 0]
    return np.array([(x.data_ptr(), _TYPES[x.dtype], x.shape[1], *pointers, *sizes)], _PROBLEM)


def _launch(
    kernel: str, matrices: list[DeviceMatrix], problem: _Struct, tokens: int, of: DeviceMatrix | None = None
) -> None:
    """Launch a kernel with as many blocks as run at a time."""
    matrix = of or matrices[0]
    device = _device(matrix.device.index)
    program = _program(matrix, _TOKENS[0] if tokens <= _TOKENS[0] else _TOKENS[-1])
    arguments = [problem, *map(_matrix, matrices)]
    program.launch(kernel, _RESIDENT * device.processors, _THREADS, arguments, device.shared)
