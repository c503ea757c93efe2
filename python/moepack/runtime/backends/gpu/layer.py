"""Launches of kernels that are built on `cuda/common/layer.cuh`: how work is cut, and the structures that they take."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Program

__all__ = ["BLOCK_ROWS", "CHUNK", "RESIDENT", "THREADS", "TOKENS", "TYPES", "LayerKernels", "Struct", "device_of"]

THREADS = 256
BLOCK_ROWS = 16
CHUNK = 128
"""Columns of a chunk."""

RESIDENT = 2
"""Blocks of a multiprocessor at a time, for whose registers and shared memory kernels are compiled."""

TOKENS = (8, 32)
"""Most tokens of a tile, the columns of a product: a program each."""

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_STATIC_BYTES = 9 << 10
"""Shared memory of a block beside what it is launched with: the routing, and what the driver takes."""

_PROBLEM = np.dtype(
    [("x", np.uint64), ("type", np.int32), ("width", np.int32)]
    + [(name, np.uint64) for name in ("index", "weights", "out")]
    + [(name, np.int32) for name in ("tokens", "top_k", "experts", "rows", "columns", "row_blocks", "splits", "unused")]
)

Struct = NDArray[Any]


class Device(NamedTuple):
    """What a launch asks of a GPU: its multiprocessors, and the dynamic shared memory of a block of two on one."""

    processors: int
    shared: int


class LayerKernels(ABC):
    """The launches of a family whose Format fills `Layer` (`cuda/common/layer.cuh`)."""

    cell_bytes: int
    """Of a token's chunk in shared memory."""

    @abstractmethod
    def specification(self, matrix: DeviceMatrix) -> tuple[Any, ...]:
        """What the kernels of a matrix are specialized to."""

    @abstractmethod
    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """The kernels of a matrix for tiles of so many tokens."""

    @abstractmethod
    def struct(self, matrix: DeviceMatrix) -> Struct:
        """The Format's `Matrix`."""

    def activations(self, matrix: DeviceMatrix, x: Tensor) -> Tensor:
        """What the kernels of a matrix read instead of x."""
        return x

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        for tokens in TOKENS:
            self.program(matrix, tokens).load()

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        self._sum(matrix, x, None, None, out)

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`; a gate and an up projection of different specifications are two launches."""
        if self.specification(gate) == self.specification(up):
            self._by_slot("gated", [gate, up], x, index, hidden)
        else:
            self._by_slot("project", [gate], x, index, hidden)
            self._by_slot("multiply", [up], x, index, hidden)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`; where the sum is split over blocks, its parts take memory of torch's allocator."""
        self._sum(down, hidden, index, weights, out)

    def _by_slot(self, kernel: str, matrices: list[DeviceMatrix], x: Tensor, index: Tensor, out: Tensor) -> None:
        """Launch a kernel that writes a row for each slot."""
        experts, _, columns = matrices[0].shape
        mean = index.numel() / max(min(index.numel(), experts), 1)
        # Activations that fit into shared memory are copied once for many row tiles; others are shared by more rows.
        fits = mean * -(-columns // CHUNK) <= device_of(x).shared // 2 // self.cell_bytes
        problem = _problem(matrices[0], self.activations(matrices[0], x), index, None, out, 1 if fits else 4, 1, len(x))
        self._launch(kernel, matrices, problem, len(x))

    def _sum(self, matrix: DeviceMatrix, x: Tensor, index: Tensor | None, weights: Tensor | None, out: Tensor) -> None:
        """Launch the kernel that sums the outputs of each token."""
        experts, rows, _ = matrix.shape
        mean = len(x) / max(min(len(x), experts), 1)
        row_blocks = next(blocks for most, blocks in ((4, 1), (8, 2), (16, 4), (512, 8)) if mean <= most)
        tiles = -(-rows // (BLOCK_ROWS * row_blocks))
        splits = 1 if row_blocks == 1 else max(1, min(8, RESIDENT * device_of(x).processors // tiles))
        parts = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        prepared = self.activations(matrix, x)
        problem = _problem(matrix, prepared, index, weights, parts, row_blocks, splits, len(out))
        self._launch("combine", [matrix], problem, len(out))
        if splits > 1:
            torch.sum(parts, 0, out=out)

    def _launch(self, kernel: str, matrices: list[DeviceMatrix], problem: Struct, tokens: int) -> None:
        """Launch a kernel of a layer with as many blocks as run at a time."""
        device = device_of(matrices[0].data)
        program = self.program(matrices[0], TOKENS[0] if tokens <= TOKENS[0] else TOKENS[-1])
        arguments = [problem, *map(self.struct, matrices)]
        program.launch(kernel, RESIDENT * device.processors, THREADS, arguments, device.shared)


def device_of(tensor: Tensor) -> Device:
    """The GPU of a tensor."""
    return _device(tensor.device.index)


@cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_multiprocessor // RESIDENT - _STATIC_BYTES
    return Device(properties.multi_processor_count, shared // 128 * 128)


def _problem(
    matrix: DeviceMatrix,
    x: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    row_blocks: int,
    splits: int,
    tokens: int,
) -> Struct:
    """The arguments of a launch beside the matrices."""
    experts, rows, columns = matrix.shape
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (index, weights, out)]
    top_k = 1 if index is None else index.shape[1]
    sizes = [tokens, top_k, experts, rows, columns, row_blocks, splits, 0]
    return np.array([(x.data_ptr(), TYPES[x.dtype], x.shape[1], *pointers, *sizes)], _PROBLEM)
