"""What launches of `cuda/coded.cu` share: the kernels' structures, the division of shared memory, small launches."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.layer import BLOCK_ROWS
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.routes import ROUTES, Routes
from moepack.backends.gpu.structs import ACTIVATIONS, DIVISOR, Struct, StructValue, activations, divisor

__all__ = [
    "CHUNK", "GROUP", "HEADER_WORDS", "MANY_THREADS", "MOST_TABLES", "SECTIONS", "THREADS", "add_slots", "cells_of",
    "column_scales", "gate_slots", "is_dependent", "numbers", "problem_of", "processors_and_memory", "program",
    "scaled", "segments_of", "share", "shared_bytes", "struct", "tiles_program",
]  # fmt: skip

HEADER_WORDS = 26
SECTIONS = ("head", "scales", "columns", "tables", "blocks", "starts", "firsts", "corrections", "records")

CHUNK = 256
"""Columns of a record."""

GROUP = 16
"""Columns of a product."""

_STATIC_BYTES = 13 << 10
"""Shared memory of a block in addition to its dynamic part: routing, notes, and the driver's reserve."""

_SLACK = 128
"""Bytes after a record in shared memory that lanes may read, for rows and columns that do not exist."""

THREADS = {1: 1024, 8: 1024, 16: 896, 32: 512}
"""The most threads per block by tokens per tile, limited by the registers that their sums need."""

MANY_THREADS = {16: 896, 32: 704}
"""The most threads per block by tokens per tile in layers with many tokens."""

_ROW_THREADS, _ITEM_THREADS = 256, 512
"""Threads of a block of small launches."""

MOST_TABLES = 64
"""The most tables of a tensor."""

_MATRIX = Struct("coded_block.cuh", "CodedMatrix")
_PROBLEM = Struct("coded_block.cuh", "CodedProblem", Activations=ACTIVATIONS, Divisor=DIVISOR, Routes=ROUTES)
_COLUMN_SCALES = Struct("coded_rows.cuh", "ColumnScales")
_NO_ROUTES = ROUTES(count=None, expert=None, tokens=None, slot=None, place=None)


def gate_slots(gate: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor, products: Tensor) -> None:
    """Write silu(hidden) * products to hidden [T * k, I], for slots whose experts exist."""
    problem = problem_of([gate], x, index, None, hidden, index.shape[1])
    _launch_rows("gate_slots", gate, len(hidden), [problem, products], hidden.device)


def add_slots(down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, slots: Tensor, out: Tensor) -> None:
    """Sum the outputs of slots [T * k, H] of each token."""
    problem = problem_of([down], hidden, index, weights, out, index.shape[1])
    _launch_rows("add_slots", down, len(out), [problem, slots], out.device)


def _launch_rows(kernel: str, matrix: DeviceMatrix, rows: int, arguments: list[Argument], device: torch.device) -> None:
    """Launch a kernel whose blocks process rows."""
    grid = min(rows, 8 * processors_and_memory(device.index)[0])
    program(8, is_dependent([matrix])).launch(kernel, grid, _ROW_THREADS, arguments, early=True)


def cells_of(problem: StructValue, places: int, device: torch.device) -> Tensor:
    """Return memory for the operands of places and their notes, which `problem` refers to afterwards."""
    bytes_of_place = int(problem["groups"][0]) * 32
    kept = torch.empty(places * (bytes_of_place + 8), dtype=torch.uint8, device=device)
    problem["cells"], problem["notes"] = kept.data_ptr(), kept.data_ptr() + places * bytes_of_place
    return kept


def scaled(
    matrix: DeviceMatrix, x: Tensor, index: Tensor | None, top_k: int, slots: int, of_slots: bool
) -> tuple[Tensor, int]:
    """Multiply activations, per slot or per token, by the column scales.

    Returns:
        The products, float32, and the number of slots that share a row of them (if rows were not per slot already).
    """
    scales = column_scales(matrix)
    each = top_k if scales["stride"][0] and not of_slots else 1
    rows = slots if scales["stride"][0] else len(x)
    out = torch.empty((rows, x.shape[1]), dtype=torch.float32, device=x.device)
    problem = problem_of([matrix], x, index, None, out, 1)
    grid = min(-(-out.numel() // (8 * _ITEM_THREADS)), 4 * processors_and_memory(x.device.index)[0])
    arguments: list[Argument] = [problem, scales, rows, each, out]
    program(8, is_dependent([matrix])).launch("scale_columns", grid, _ITEM_THREADS, arguments, early=True)
    return out, top_k // each


def problem_of(
    matrices: list[DeviceMatrix],
    x: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    top_k: int,
    routes: Routes | None = None,
) -> StructValue:
    """The kernels' `CodedProblem` structure, without the layout of shared memory."""
    experts, rows, columns = matrices[0].shape
    slots = len(x) if index is None else index.numel()
    chunks, of_segment = -(-columns // CHUNK), numbers(matrices[0])[1]
    return _PROBLEM(
        x=activations(x), index=index, weights=weights, out=out, cells=None, notes=None,
        routes=routes.struct if routes else _NO_ROUTES,
        tokens=slots // top_k, experts=experts, rows=rows, groups=-(-columns // GROUP), chunks=chunks,
        of_segment=of_segment, table_bytes=0, sum_bytes=0, cell_bytes=0, stage=0, one=1,
        top_k=divisor(top_k), segments=divisor(-(-chunks // of_segment)), blocks=divisor(-(-rows // BLOCK_ROWS)),
    )  # fmt: skip


def share(problem: StructValue, matrices: list[DeviceMatrix], most: int, threads: int, sums: int, cells: int) -> int:
    """Divide the shared memory of a block that uses at most `most` tables per matrix.

    Returns:
        The number of warps; each has two records.
    """
    stage = -(-(max(numbers(matrix)[2] for matrix in matrices) + _SLACK) // 128) * 128
    space = processors_and_memory(matrices[0].device.index)[1]
    tables = sum(min(numbers(matrix)[0], most) for matrix in matrices) << 10
    room = space - sums - cells
    copies = next((n for n in (32, 16, 8, 4, 2) if n * tables <= room - 2 * stage * (threads // 32)), 1)
    sizes = (copies * tables, -(-sums // 128) * 128, -(-cells // 128) * 128, stage)
    for name, size in zip(("table_bytes", "sum_bytes", "cell_bytes", "stage"), sizes, strict=True):
        problem[name] = size
    return max(1, min(threads // 32, (space - sum(sizes[:3])) // (2 * stage)))


def shared_bytes(problem: StructValue, warps: int) -> int:
    """Dynamic shared memory of a launch in bytes."""
    areas = int(sum(problem[name][0] for name in ("table_bytes", "sum_bytes", "cell_bytes")))
    return areas + warps * 2 * int(problem["stage"][0])


def struct(matrix: DeviceMatrix) -> StructValue:
    """The kernels' `CodedMatrix` structure."""
    tables, _, _, row_scales, _ = numbers(matrix)
    pointers = {name: matrix.pointer(name) for name in SECTIONS if name not in ("head", "columns")}
    return _MATRIX(**pointers, row_scales=row_scales, table_count=tables)


def column_scales(matrix: DeviceMatrix) -> StructValue:
    """The kernels' `ColumnScales` structure; rows of scales are padded to a multiple of 16."""
    size, row = matrix.sections["columns"][1], -(-matrix.shape[2] // GROUP) * GROUP
    return _COLUMN_SCALES(first=matrix.pointer("columns") if size else None, stride=row if size > 4 * row else 0)


def segments_of(matrix: DeviceMatrix) -> int:
    """The number of column segments of a row block."""
    return -(-matrix.shape[2] // (CHUNK * numbers(matrix)[1]))


def numbers(matrix: DeviceMatrix) -> list[int]:
    """The tables of a matrix, the chunks of a segment, the bytes of the longest record, whether each row has a scale,
    and whether corrections are small (`CodedKernels`)."""
    found: list[int] = matrix.tables["numbers"].tolist()
    return found


def is_dependent(matrices: Sequence[DeviceMatrix]) -> bool:
    """Whether any matrix has dependent codes; kernels that follow their paths also run plain codes, but slower."""
    return any(matrix.details["symbols"] == "dependent" for matrix in matrices)


@cache
def program(tokens: int, dependent: bool = False, *, many: bool = False) -> Program:
    """The kernels for tiles of this many tokens, and of all sizes; `many` for layers with many tokens."""
    threads = (MANY_THREADS if many else THREADS)[tokens]
    return Program("coded.cu", TOKENS=tokens, MOST_THREADS=threads, DEPENDENT=int(dependent), MANY=int(many))


@cache
def tiles_program() -> Program:
    """The kernels that multiply decoded weights."""
    return Program("coded_grouped.cu")


@cache
def processors_and_memory(index: int) -> tuple[int, int]:
    """The number of multiprocessors of a GPU, and the dynamic shared memory of a block that occupies one alone."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - _STATIC_BYTES
