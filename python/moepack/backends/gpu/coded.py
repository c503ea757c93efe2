"""Products with coded integers on a GPU: launches of `cuda/coded.cu`.

On a GPU these tensors use another layout with its own magic number (`rust/core`, formats/coded/device). `uploaded`
creates it. Opening it on another device converts it back, so models can still be moved from a GPU to the CPU.
"""

from functools import cache
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moepack import _core
from moepack.backends.gpu.layer import BLOCK_ROWS
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.structs import ACTIVATIONS, DIVISOR, Struct, StructValue, activations, divisor
from moepack.registry import OpenTensor, register

__all__ = ["KERNELS", "CodedKernels", "packed", "uploaded"]

MAGIC = b"MOEPRDEV"
HEADER_WORDS = 26
SECTIONS = ("head", "scales", "columns", "tables", "blocks", "starts", "firsts", "corrections", "records")

_CHUNK = 256
_GROUP = 16
_STATIC_BYTES = 13 << 10
"""Shared memory of a block in addition to its dynamic part: routing, notes, and the driver's reserve."""

_SLACK = 128
"""Bytes after a record in shared memory that lanes may read, for rows and columns that do not exist."""

_SUM_BYTES = 32 << 10
"""Bytes of sums in a round of many tasks."""

_MOST_SUM_BYTES = 96 << 10
"""The most bytes of sums of one task: long rows use tiles of fewer tokens."""

_CELL_BYTES = 40 << 10
"""The most bytes of operands that each block lays out itself; larger ones use a separate launch."""

_THREADS = {1: 1024, 8: 1024, 16: 896, 32: 512}
"""The most threads per block by tokens per tile, limited by the registers that their sums need."""

_MOST_TABLES = 64
"""The most tables of a tensor."""

_MATRIX = Struct("coded_block.cuh", "CodedMatrix")
_PROBLEM = Struct("coded_block.cuh", "CodedProblem", Activations=ACTIVATIONS, Divisor=DIVISOR)
_COLUMN_SCALES = Struct("coded_rows.cuh", "ColumnScales")


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

    - `numbers`, int64 on the CPU: the number of tables, chunks per segment, bytes of the longest record, and whether
      each row has a scale;
    - `columns`: a digest of the column scales.

    Products with column scales allocate memory from torch's allocator for the scaled activations.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        words = matrix.data[: 8 * HEADER_WORDS].cpu().view(torch.int64)
        matrix.tables["numbers"] = words[4:8].clone()
        places = words[8:].view(-1, 2).tolist()
        matrix.sections = {name: (start, size) for name, (start, size) in zip(SECTIONS, places, strict=True)}
        start, size = matrix.sections["columns"]
        digest = sha256(matrix.data[start : start + size].cpu().numpy().tobytes()).digest()
        matrix.tables["columns"] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        Program.load_all([_program(tokens, _dependent([matrix])) for tokens in _THREADS])

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
        problem = _problem([gate], x, index, None, hidden, top_k)
        _launch_items("gate_slots", gate, hidden.numel(), [problem, products], hidden.device)

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
        problem = _problem([down], hidden, index, weights, out, index.shape[1])
        _launch_items("add_slots", down, out.numel(), [problem, slots], out.device)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        _, rows, columns = matrix.shape
        blocks = -(-rows // BLOCK_ROWS)
        if not out.numel():
            return
        problem = _problem([matrix], out, None, None, out, 1)
        warps = _share(problem, [matrix], _MOST_TABLES, _THREADS[8], 0, 0)
        grid = min(-(-len(out) * blocks * int(problem["segments"]["by"][0]) // warps), _device(out.device.index)[0])
        arguments: list[Argument] = [
            problem, _struct(matrix), _column_scales(matrix), np.int64(first * blocks), np.int64(len(out) * blocks),
            columns, int(out.dtype is torch.float32), out,
        ]  # fmt: skip
        _program(8, _dependent([matrix])).launch("dequantize", grid, 32 * warps, arguments, _shared(problem, warps))


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
    first, processors = matrices[0], _device(out.device.index)[0]
    more = -x.shape[1] % 8
    x = functional.pad(x, (0, more)) if more else x  # rows start at multiples of 16 bytes
    slots, combines = len(x) if index is None else index.numel(), kernel == "combine"
    chunks, groups = (-(-first.shape[2] // size) for size in (_CHUNK, _GROUP))
    segments = -(-chunks // _numbers(first)[1])
    tokens = _tile(slots, first.shape[0], top_k, segments * len(matrices))
    tiles = min(slots, first.shape[0] + slots // tokens)
    # Units of a task: the segments of each matrix, or for a sum over experts, those of all tiles.
    units = segments * (tiles if combines else len(matrices))
    tasks = -(-first.shape[1] // BLOCK_ROWS) * (1 if combines else tiles)
    of_block, unit_bytes = -(-tasks // processors), min(slots, tokens) * BLOCK_ROWS * 4
    if combines and units * unit_bytes > _SUM_BYTES:
        return False
    if first.sections["columns"][1]:
        x, top_k = _scaled(first, x, index, top_k, slots, combines)
    problem = _problem(matrices, x, index, weights, out, top_k)
    sums = max(units, min(units * of_block, _SUM_BYTES // unit_bytes // units * units)) * unit_bytes
    cells = (1 if slots == top_k and not combines else slots) * groups * 32
    threads, tables = min(_THREADS[tokens], 32 * units * of_block), of_block * (tiles if combines else 1)
    warps = _share(problem, matrices, tables, threads, sums, cells)
    program, kept = _program(tokens, _dependent(matrices)), None
    if cells > _CELL_BYTES or (cells > 16 << 10 and warps < threads // 32):
        kept = torch.empty(slots * (groups * 32 + 8), dtype=torch.uint8, device=out.device)
        problem["cells"], problem["notes"] = kept.data_ptr(), kept.data_ptr() + len(kept) - slots * 8
        name = "lay_out_hidden" if combines else "lay_out_tokens"
        program.launch(name, slots, _THREADS[tokens], [problem], early=True)
        warps = _share(problem, matrices, tables, threads, sums, 0)
    arguments: list[Argument] = [problem, *map(_struct, matrices)]
    shared = _shared(problem, warps)
    program.launch(kernel, min(tasks, processors), 32 * warps, arguments, shared, early=True)
    del kept
    return True


def _scaled(
    matrix: DeviceMatrix, x: Tensor, index: Tensor | None, top_k: int, slots: int, of_slots: bool
) -> tuple[Tensor, int]:
    """Multiply activations, per slot or per token, by the column scales.

    Returns:
        The products, float32, and the number of slots that share a row of them (if rows were not per slot already).
    """
    scales = _column_scales(matrix)
    each = top_k if scales["stride"][0] and not of_slots else 1
    rows = slots if scales["stride"][0] else len(x)
    scaled = torch.empty((rows, x.shape[1]), dtype=torch.float32, device=x.device)
    problem = _problem([matrix], x, index, None, scaled, 1)
    _launch_items("scale_columns", matrix, scaled.numel() // 8, [problem, scales, rows, each, scaled], x.device)
    return scaled, top_k // each


def _launch_items(
    kernel: str, matrix: DeviceMatrix, items: int, arguments: list[Argument], device: torch.device
) -> None:
    """Launch a kernel whose threads process `items`."""
    grid = min(-(-items // 512), 4 * _device(device.index)[0])
    _program(8, _dependent([matrix])).launch(kernel, grid, 512, arguments, early=True)


def _problem(
    matrices: list[DeviceMatrix], x: Tensor, index: Tensor | None, weights: Tensor | None, out: Tensor, top_k: int
) -> StructValue:
    """The kernels' `CodedProblem` structure, without the layout of shared memory."""
    experts, rows, columns = matrices[0].shape
    slots = len(x) if index is None else index.numel()
    chunks, of_segment = -(-columns // _CHUNK), _numbers(matrices[0])[1]
    return _PROBLEM(
        x=activations(x), index=index, weights=weights, out=out, cells=None, notes=None,
        tokens=slots // top_k, experts=experts, rows=rows, groups=-(-columns // _GROUP), chunks=chunks,
        of_segment=of_segment, table_bytes=0, sum_bytes=0, cell_bytes=0, stage=0, one=1,
        top_k=divisor(top_k), segments=divisor(-(-chunks // of_segment)), blocks=divisor(-(-rows // BLOCK_ROWS)),
    )  # fmt: skip


def _share(problem: StructValue, matrices: list[DeviceMatrix], most: int, threads: int, sums: int, cells: int) -> int:
    """Divide the shared memory of a block that uses at most `most` tables per matrix.

    Returns:
        The number of warps; each has two records.
    """
    stage = -(-(max(_numbers(matrix)[2] for matrix in matrices) + _SLACK) // 128) * 128
    space = _device(matrices[0].device.index)[1]
    tables = sum(min(_numbers(matrix)[0], most) for matrix in matrices) << 10
    room = space - sums - cells
    copies = next((n for n in (32, 16, 8, 4, 2) if n * tables <= room - 2 * stage * (threads // 32)), 1)
    sizes = (copies * tables, -(-sums // 128) * 128, -(-cells // 128) * 128, stage)
    for name, size in zip(("table_bytes", "sum_bytes", "cell_bytes", "stage"), sizes, strict=True):
        problem[name] = size
    return max(1, min(threads // 32, (space - sum(sizes[:3])) // (2 * stage)))


def _shared(problem: StructValue, warps: int) -> int:
    """Dynamic shared memory of a launch in bytes."""
    return int(sum(problem[name][0] for name in ("table_bytes", "sum_bytes", "cell_bytes"))) + warps * 2 * int(
        problem["stage"][0]
    )


def _tile(slots: int, experts: int, top_k: int, units: int) -> int:
    """Return the most tokens per tile.

    All tokens of an expert if tokens choose all experts, otherwise twice the average; fewer if the sums of `units`
    units would not fit.
    """
    if slots == top_k:
        return 1
    wanted = max(2, slots // top_k if top_k >= experts else min(slots, 2 * slots / experts))
    fit = [tokens for tokens in _THREADS if units * min(slots, tokens) * BLOCK_ROWS * 4 <= _MOST_SUM_BYTES]
    return next((tokens for tokens in fit if wanted <= tokens), max(fit, default=1))


def _struct(matrix: DeviceMatrix) -> StructValue:
    """The kernels' `CodedMatrix` structure."""
    tables, _, _, row_scales = _numbers(matrix)
    pointers = {name: matrix.pointer(name) for name in SECTIONS if name not in ("head", "columns")}
    return _MATRIX(**pointers, row_scales=row_scales, table_count=tables)


def _column_scales(matrix: DeviceMatrix) -> StructValue:
    """The kernels' `ColumnScales` structure; rows of scales are padded to a multiple of 16."""
    size, row = matrix.sections["columns"][1], -(-matrix.shape[2] // _GROUP) * _GROUP
    return _COLUMN_SCALES(first=matrix.pointer("columns") if size else None, stride=row if size > 4 * row else 0)


def _numbers(matrix: DeviceMatrix) -> list[int]:
    numbers: list[int] = matrix.tables["numbers"].tolist()
    return numbers


def _dependent(matrices: list[DeviceMatrix]) -> bool:
    """Whether any matrix has dependent codes; kernels that follow their paths also run plain codes, but slower."""
    return any(matrix.details["symbols"] == "dependent" for matrix in matrices)


@cache
def _program(tokens: int, dependent: bool = False) -> Program:
    return Program("coded.cu", TOKENS=tokens, MOST_THREADS=_THREADS[tokens], DEPENDENT=int(dependent))


@cache
def _device(index: int) -> tuple[int, int]:
    """The number of multiprocessors of a GPU, and the dynamic shared memory of a block that occupies one alone."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - _STATIC_BYTES
