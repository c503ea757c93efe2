"""Layers of experts of coded integers with many tokens.

A launch sorts the tokens by expert. For up to `_COLUMNS` tokens per expert on average, kernels decode weights for tiles
of tokens (`cuda/coded.cu`). For more, most weights would be decoded several times; on Hopper, they are decoded once to
f16 codes, which the kernels for many tokens multiply (`cuda/coded_grouped.cu`). Both are captured in CUDA graphs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moepack.backends.gpu import grouped
from moepack.backends.gpu.coded_launch import (
    GROUP,
    MANY_THREADS,
    MOST_TABLES,
    THREADS,
    add_slots,
    cells_of,
    column_scales,
    gate_slots,
    is_dependent,
    numbers,
    problem_of,
    processors_and_memory,
    program,
    scaled,
    share,
    shared_bytes,
    struct,
    tiles_program,
)  # fmt: skip
from moepack.backends.gpu.layer import BLOCK_ROWS, Grouped, device_of, padded
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument
from moepack.backends.gpu.prompt import DECODED_BYTES
from moepack.backends.gpu.routes import COUNTED_EXPERTS, Routes
from moepack.backends.gpu.structs import Struct

__all__ = ["experts", "supports"]

_COLUMNS = {16: 10, 32: 24}
"""Tokens per tile, and the most tokens per expert on average for which they are used. With more tokens, many experts
would be decoded more than once."""

_DECODED_COLUMNS = {64: 48, 96: 1 << 31}
"""Tokens per tile of products with decoded weights, and the most tokens per expert on average for which they are used.
Every tile reads its weights again."""

_LAYOUT_THREADS = 256
"""Threads of a block that lays out the activations of a place."""

_HEADER = 4 * BLOCK_ROWS
"""Bytes before the codes of a decoded row block: the scales of its rows."""

_TILES = Struct("coded_tiles.cuh", "CodedTiles::Matrix")


def supports(matrices: Sequence[DeviceMatrix], slots: int) -> bool:
    """Return whether `experts` can multiply a gated layer.

    Args:
        matrices: gate, up and down projections, or other layers, which are not supported.
        slots: pairs of a token and one of its experts.
    """
    coded = len(matrices) == 3 and all(matrix.kind == "coded" for matrix in matrices)
    if not coded or matrices[0].shape[0] > COUNTED_EXPERTS:
        return False
    return _columns(matrices, slots) is not None or _can_decode(matrices)


def experts(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum the outputs of each token's experts in a supported layer with SiLU, on one GPU.

    Arguments and result are as in `Backend.experts`, with 16-bit activations.
    """
    columns = _columns(matrices, index.numel())
    if columns is not None:
        return _fused(matrices, x, index, weights, columns)
    out = torch.empty((len(x), matrices[-1].shape[1]), dtype=torch.float32, device=x.device)
    for tokens in grouped.calls(out, index.shape[1]):
        _decoded(matrices, x[tokens], index[tokens], weights[tokens], out[tokens])
    return out


def _columns(matrices: Sequence[DeviceMatrix], slots: int) -> int | None:
    """Tokens per tile of kernels that decode and multiply; None for more tokens than pay."""
    return next((columns for columns, mean in _COLUMNS.items() if slots <= mean * matrices[0].shape[0]), None)


def _fused(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, columns: int) -> Tensor:
    """A layer whose weights are decoded for tiles of tokens."""
    (gate, up, down), slots = matrices, index.numel()
    routes = Routes(index, gate.shape[0], columns)
    routes.sort(program(columns, is_dependent(matrices), many=True))
    # Outputs of the gate, which are gated in place, and of up.
    hidden = torch.empty((2, slots, gate.shape[1]), dtype=torch.float32, device=x.device)
    if _share_columns(gate, up):
        _launch("gated", [gate, up], x, index, hidden, index.shape[1], routes)
    else:
        for matrix, part in zip((gate, up), hidden, strict=True):
            _launch("project", [matrix], x, index, part, index.shape[1], routes)
    gate_slots(gate, x, index, *hidden)
    outputs = torch.empty((slots, down.shape[1]), dtype=torch.float32, device=x.device)
    _launch("project", [down], hidden[0], index, outputs, 1, routes)
    out = torch.empty((len(x), down.shape[1]), dtype=torch.float32, device=x.device)
    add_slots(down, hidden[0], index, weights, outputs, out)
    return out


def _share_columns(gate: DeviceMatrix, up: DeviceMatrix) -> bool:
    """Whether two matrices have the same column scales, so that they share activations."""
    return torch.equal(gate.tables["columns"], up.tables["columns"])


def _launch(
    kernel: str, matrices: list[DeviceMatrix], x: Tensor, index: Tensor, out: Tensor, top_k: int, routes: Routes
) -> None:
    """Launch a product whose warps multiply whole row blocks; `gated` writes [2, slots, R], others [slots, R]."""
    first, processors = matrices[0], processors_and_memory(out.device.index)[0]
    experts, rows, _ = first.shape
    x = padded(x)
    if first.sections["columns"][1]:
        x, top_k = scaled(first, x, index, top_k, index.numel(), False)
    problem = problem_of(matrices, x, index, None, out, top_k, routes)
    kernels, places = program(routes.columns, is_dependent(matrices), many=True), routes.tiles * routes.columns
    kept = cells_of(problem, places, out.device)
    kernels.launch("lay_out_tokens", min(places, 4 * processors), _LAYOUT_THREADS, [problem], early=True)
    # Most experts have one tile. Warps have equal numbers of row blocks, if possible.
    blocks = -(-min(experts, index.numel()) * -(-rows // BLOCK_ROWS) // processors)
    units = blocks * len(matrices)
    passes = -(-units // (MANY_THREADS[routes.columns] // 32))
    warps = share(problem, matrices, blocks, 32 * -(-units // passes), 0, 0)
    arguments: list[Argument] = [problem, *map(struct, matrices)]
    kernels.launch(kernel, processors, 32 * warps, arguments, shared_bytes(problem, warps), early=True)
    del kept


def _can_decode(matrices: Sequence[DeviceMatrix]) -> bool:
    """Whether the decoded codes of gate and up, and of down, fit and are exact."""
    gate, up, down = matrices
    if not (gate.data.is_cuda and device_of(gate.data).has_warpgroups and all(numbers(each)[-1] for each in matrices)):
        return False
    return max(_decoded_bytes(gate) + _decoded_bytes(up), _decoded_bytes(down)) <= DECODED_BYTES


def _decoded(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
    """A layer whose weights are decoded once; writes to out [T, H] float32."""
    (gate, up, down), top_k = matrices, index.shape[1]
    columns = next(each for each, mean in _DECODED_COLUMNS.items() if index.numel() <= mean * gate.shape[0])
    routes = Routes(index, gate.shape[0], columns)
    routes.sort(tiles_program())
    if _share_columns(gate, up):
        hidden = _product("gated", [gate, up], x, index, top_k, routes)
    else:
        first, second = (_product("project", [matrix], x, index, top_k, routes) for matrix in (gate, up))
        hidden = functional.silu(first).mul_(second)
    expert = routes.experts() if column_scales(down)["stride"][0] else None
    outputs = _product("project", [down], hidden, expert, 0, routes)
    grouped.add(tiles_program(), routes, outputs, weights, out)


def _product(
    kernel: str, matrices: list[DeviceMatrix], x: Tensor, index: Tensor | None, top_k: int, routes: Routes
) -> Tensor:
    """Decode matrices and multiply; as `grouped.product`, with the expert of each slot or place in `index`."""
    first, rows = matrices[0], padded(x)
    if first.sections["columns"][1]:
        slots = len(rows) if index is None else index.numel()
        rows, shared = scaled(first, rows, index, max(top_k, 1), slots, False)
        top_k = shared if top_k else 0
    decoded = [_decode(matrix) for matrix in matrices]
    formats = [Grouped(tiles_program(), tiles, 2 * grouped.CHUNK) for tiles, _ in decoded]
    out = grouped.product(routes, kernel, formats, first.shape, rows, None, top_k)
    del decoded
    return out


def _decode(matrix: DeviceMatrix) -> tuple[np.ndarray, Tensor]:
    """Decode all experts to f16 codes; returns the kernels' `CodedTiles::Matrix` structure and its memory."""
    experts, rows, _ = matrix.shape
    count, size = experts * -(-rows // BLOCK_ROWS), _block_bytes(matrix)
    memory = torch.empty(count * size, dtype=torch.uint8, device=matrix.device)
    codes = memory.view(torch.bfloat16).view(1, -1)
    problem = problem_of([matrix], codes, None, None, codes, 1)
    warps = share(problem, [matrix], MOST_TABLES, THREADS[8], 0, 0)
    segments = int(problem["segments"]["by"][0])
    grid = min(-(-count * segments // warps), processors_and_memory(memory.device.index)[0])
    arguments: list[Argument] = [problem, struct(matrix), np.int64(count), np.int64(size), memory]
    shared = shared_bytes(problem, warps)
    program(8, is_dependent([matrix])).launch("decode_halves", grid, 32 * warps, arguments, shared, early=True)
    return _TILES(data=memory, block_bytes=size), memory


def _block_bytes(matrix: DeviceMatrix) -> int:
    """Bytes of a decoded row block."""
    return _HEADER + 2 * BLOCK_ROWS * GROUP * -(-matrix.shape[2] // GROUP)


def _decoded_bytes(matrix: DeviceMatrix) -> int:
    experts, rows, _ = matrix.shape
    return experts * -(-rows // BLOCK_ROWS) * _block_bytes(matrix)
