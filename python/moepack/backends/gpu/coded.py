"""Products with coded integers on a GPU: launches of `cuda/coded.cu`.

On a GPU these tensors use another layout with its own magic number (`rust/core`, formats/coded/device). `uploaded`
creates it. Opening it on another device converts it back, so models can still be moved from a GPU to the CPU.
"""

from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moepack import _core
from moepack.backends.gpu.coded_launch import (
    GROUP,
    HEADER_WORDS,
    MANY_THREADS,
    MOST_TABLES,
    SECTIONS,
    THREADS,
    add_slots,
    cells_of,
    column_scales,
    gate_slots,
    is_dependent,
    problem_of,
    processors_and_memory,
    program,
    scaled,
    segments_of,
    share,
    shared_bytes,
    struct,
    tiles_program,
)  # fmt: skip
from moepack.backends.gpu.layer import BLOCK_ROWS, device_of
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.registry import OpenTensor, register

__all__ = ["KERNELS", "CodedKernels", "packed", "uploaded"]

MAGIC = b"MOEPRDEV"

_SUM_BYTES = 32 << 10
"""Bytes of sums in a round of many tasks."""

_MOST_SUM_BYTES = 96 << 10
"""The most bytes of sums of one task: long rows use tiles of fewer tokens."""

_CELL_BYTES = 40 << 10
"""The most bytes of operands that each block lays out itself; larger ones use a separate launch."""

_LARGEST = 2.0**-13
"""A correction of 2^11 as it is stored."""


def uploaded(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the GPU bytes of a packed `coded` tensor in either layout.

    Raises:
        CorruptionError: the bytes are not such a tensor.
    """
    return _core.coded_to_device(packed(data))


def packed(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the packed tensor for either layout."""
    return _core.coded_from_device(data) if data[: len(MAGIC)].tobytes() == MAGIC else data


def _open(data: NDArray[np.uint8]) -> OpenTensor:
    return _core.PackedTensor(packed(data))


register("coded-device", MAGIC, _open)


class CodedKernels:
    """Kernels of `coded`. The tables of a matrix:

    - `numbers`, int64 on the CPU: the number of tables, chunks per segment, bytes of the longest record, whether each
      row has a scale, and whether each correction is below 2^11, so that no code has several;
    - `columns`: a digest of the column scales.

    Products with column scales allocate memory from torch's allocator for the scaled activations.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        words = matrix.data[: 8 * HEADER_WORDS].cpu().view(torch.int64)
        places = words[8:].view(-1, 2).tolist()
        matrix.sections = {name: (start, size) for name, (start, size) in zip(SECTIONS, places, strict=True)}
        start, size = matrix.sections["corrections"]
        halves = matrix.data[start : start + size].view(torch.float16)[1::2]
        small = not size or float(halves.abs().max()) < _LARGEST
        matrix.tables["numbers"] = torch.cat([words[4:8], torch.tensor([int(small)])])
        start, size = matrix.sections["columns"]
        digest = sha256(matrix.data[start : start + size].cpu().numpy().tobytes()).digest()
        matrix.tables["columns"] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        dependent = is_dependent([matrix])
        programs = [program(tokens, dependent) for tokens in THREADS]
        if matrix.shape[0] > 1:
            programs += [program(tokens, dependent, many=True) for tokens in MANY_THREADS]
            programs += [tiles_program()] * (matrix.data.is_cuda and device_of(matrix.data).has_warpgroups)
        Program.load_all(programs)

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        _launch("project", [matrix], x, None, None, out, 1)

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`.

        Matrices with different column scales cannot share activations, so they are multiplied in separate launches.
        Outputs of the second launch use memory from torch's allocator.
        """
        top_k = index.shape[1]
        if torch.equal(gate.tables["columns"], up.tables["columns"]):
            _launch("gated", [gate, up], x, index, None, hidden, top_k)
            return
        products = torch.empty_like(hidden)
        _launch("project", [gate], x, index, None, hidden, top_k)
        _launch("project", [up], x, index, None, products, top_k)
        gate_slots(gate, x, index, hidden, products)

    def project(self, matrix: DeviceMatrix, x: Tensor, index: Tensor, out: Tensor) -> None:
        """See `Kernels.project`."""
        _launch("project", [matrix], x, index, None, out, index.shape[1])

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`.

        If the sums of all experts do not fit into shared memory, outputs of slots use memory from torch's allocator and
        are added in a separate launch.
        """
        if _launch("combine", [down], hidden, index, weights, out, index.shape[1]):
            return
        slots = torch.empty((index.numel(), down.shape[1]), dtype=torch.float32, device=out.device)
        _launch("project", [down], hidden, index, None, slots, 1)
        add_slots(down, hidden, index, weights, slots, out)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        blocks = -(-rows // BLOCK_ROWS)
        if not out.numel():
            return
        problem = problem_of([matrix], out, None, None, out, 1)
        warps = share(problem, [matrix], MOST_TABLES, THREADS[8], 0, 0)
        grid = min(
            -(-len(out) * blocks * int(problem["segments"]["by"][0]) // warps),
            processors_and_memory(out.device.index)[0],
        )
        arguments: list[Argument] = [
            problem, struct(matrix), column_scales(matrix), np.int64(first * blocks), np.int64(len(out) * blocks),
            columns, int(out.dtype is torch.float32), out,
        ]  # fmt: skip
        program(8, is_dependent([matrix])).launch(
            "dequantize", grid, 32 * warps, arguments, shared_bytes(problem, warps)
        )


KERNELS = CodedKernels()


def _launch(
    kernel: str,
    matrices: list[DeviceMatrix],
    x: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    top_k: int,
) -> bool:
    """Launch a product and return True; a `combine` launch requires that the sums of all experts fit, else False."""
    first, processors = matrices[0], processors_and_memory(out.device.index)[0]
    more = -x.shape[1] % 8
    x = functional.pad(x, (0, more)) if more else x  # rows start at multiples of 16 bytes
    slots, combines = len(x) if index is None else index.numel(), kernel == "combine"
    segments, groups = segments_of(first), -(-first.shape[2] // GROUP)
    tokens = _tile(slots, first.shape[0], top_k, segments * len(matrices))
    tiles = min(slots, first.shape[0] + slots // tokens)
    # Units of a task: the segments of each matrix, or for a sum over experts, those of all tiles.
    units = segments * (tiles if combines else len(matrices))
    tasks = -(-first.shape[1] // BLOCK_ROWS) * (1 if combines else tiles)
    of_block, unit_bytes = -(-tasks // processors), min(slots, tokens) * BLOCK_ROWS * 4
    if combines and units * unit_bytes > _SUM_BYTES:
        return False
    if first.sections["columns"][1]:
        x, top_k = scaled(first, x, index, top_k, slots, combines)
    problem = problem_of(matrices, x, index, weights, out, top_k)
    sums = max(units, min(units * of_block, _SUM_BYTES // unit_bytes // units * units)) * unit_bytes
    cells = (1 if slots == top_k and not combines else slots) * groups * 32
    threads, tables = min(THREADS[tokens], 32 * units * of_block), of_block * (tiles if combines else 1)
    warps = share(problem, matrices, tables, threads, sums, cells)
    kernels, kept = program(tokens, is_dependent(matrices)), None
    if cells > _CELL_BYTES or (cells > 16 << 10 and warps < threads // 32):
        kept = cells_of(problem, slots, out.device)
        name = "lay_out_hidden" if combines else "lay_out_tokens"
        kernels.launch(name, slots, THREADS[tokens], [problem], early=True)
        warps = share(problem, matrices, tables, threads, sums, 0)
    arguments: list[Argument] = [problem, *map(struct, matrices)]
    shared = shared_bytes(problem, warps)
    kernels.launch(kernel, min(tasks, processors), 32 * warps, arguments, shared, early=True)
    del kept
    return True


def _tile(slots: int, experts: int, top_k: int, units: int) -> int:
    """Return the most tokens per tile.

    All tokens of an expert if tokens choose all experts, otherwise twice the average; fewer if the sums of `units`
    units would not fit.
    """
    if slots == top_k:
        return 1
    wanted = max(2, slots // top_k if top_k >= experts else min(slots, 2 * slots / experts))
    fit = [tokens for tokens in THREADS if units * min(slots, tokens) * BLOCK_ROWS * 4 <= _MOST_SUM_BYTES]
    return next((tokens for tokens in fit if wanted <= tokens), max(fit, default=1))
