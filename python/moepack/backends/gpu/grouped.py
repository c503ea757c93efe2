"""Layers of experts with many tokens on Hopper: the launches of `cuda/common/grouped.cuh`.

Kernels sort the tokens by expert and decode weights for up to 64 tokens of an expert at once. The host only needs the
shapes, so nothing synchronizes and calls can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moepack.backends.base import Between
from moepack.backends.gpu import clamped
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.layer import CHUNK, Grouped, LayerKernels, device_of, padded
from moepack.backends.gpu.linear import TILE_ROWS
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, activations

__all__ = ["experts", "supports", "supports_own"]

_ROUTES = Struct("common/grouped.cuh", "Routes")
_LAYOUT = Struct("common/grouped.cuh", "Layout", Activations=ACTIVATIONS, Routes=_ROUTES)
_GROUPED = Struct("common/grouped.cuh", "Grouped", Routes=_ROUTES)

_COLUMNS = {16: 10, 32: 24, 64: 1 << 31}
"""Tokens per product, and the most tokens per expert on average for which they are used: most experts then have their
tokens in one tile, and few columns are empty."""

_COUNTED_EXPERTS, _ROUTE_THREADS = 2048, 1024
_LAYOUT_THREADS, _LAYOUT_PLACES = 256, 4
_THREADS, _ADD_THREADS = 640, 256

OUTPUT_BYTES = 512 << 20
"""The most bytes of outputs of all slots; more tokens are processed in several calls."""


def supports(matrices: Sequence[DeviceMatrix]) -> bool:
    """Return whether these kernels can multiply a gated layer with SiLU."""
    if len(matrices) != 3 or not supports_own(matrices):
        return False
    return _known(matrices[0]).program is _known(matrices[1]).program


def supports_own(matrices: Sequence[DeviceMatrix]) -> bool:
    """Return whether these kernels can multiply a layer with code of its own between its products."""
    if matrices[0].shape[0] > _COUNTED_EXPERTS or not matrices[0].data.is_cuda:
        return False
    return device_of(matrices[0].data).has_warpgroups and None not in map(_format, matrices)


def experts(
    matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, code: Between | None = None
) -> Tensor:
    """Sum the outputs of each token's experts; arguments and result as in `Backend.experts`, on one GPU.

    With `code`, as in `Backend.own_experts`.
    """
    rows = matrices[-1].shape[1]
    out = torch.empty((len(x), rows), dtype=torch.float32, device=x.device)
    step = max(1, OUTPUT_BYTES // (4 * rows * index.shape[1]))
    for first in range(0, len(x), step):
        tokens = slice(first, first + step)
        _experts(matrices, x[tokens], index[tokens], weights[tokens], out[tokens], code)
    return out


def _experts(
    matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, out: Tensor, code: Between | None
) -> None:
    """Launch a layer: write to out [T, H] float32."""
    *first, down = matrices
    slots, top_k, count = index.numel(), index.shape[1], down.shape[0]
    columns = next(columns for columns, mean in _COLUMNS.items() if slots <= mean * count)
    routes = _Routes(slots, count, columns, x.device)
    program = _known(down).program
    order: list[Argument] = [routes.struct, index, slots, count, columns]
    program.launch("route", 1, _ROUTE_THREADS, order, early=True)
    if code is None:
        hidden = _product(routes, "gated", first, x, top_k)
        outputs = _product(routes, "project", [down], hidden, 0)
    else:
        expert, parts = routes.experts(count), [_product(routes, "project", [matrix], x, top_k) for matrix in first]
        hidden = clamped.between(code, parts, expert, count)
        outputs = _product(routes, "project", [down], hidden, 0)
        if code.clamped is not None:
            clamped.summed(code.clamped, outputs, index, weights, count, out, routes.place)
            return
        outputs = code.behind(outputs, expert).contiguous()
    rows = out.shape[1]
    grid = (-(-rows // (4 * _ADD_THREADS)), len(out))
    arguments: list[Argument] = [np.uint64(routes.place), weights, outputs, out, top_k, rows]
    program.launch("add", grid, _ADD_THREADS, arguments, early=True)


class _Routes:
    """Memory for the schedule of a launch.

    Attributes:
        columns: tokens per tile.
        tiles: an upper bound of the number of tiles.
        struct: the kernels' `Routes` structure.
        place: the address of the place of each slot.
    """

    def __init__(self, slots: int, experts: int, columns: int, device: torch.device) -> None:
        self.columns, self.tiles = columns, min(slots, slots // columns + experts)
        sizes = {"count": 1, "expert": self.tiles, "tokens": self.tiles, "slot": self.tiles * columns, "place": slots}
        starts = np.cumsum([0, *sizes.values()])
        self._memory = torch.empty(int(starts[-1]), dtype=torch.int32, device=device)
        at = {name: self._memory.data_ptr() + 4 * int(start) for name, start in zip(sizes, starts, strict=False)}
        self.struct, self.place = _ROUTES(**at), at["place"]
        self._experts = self._memory[starts[1] : starts[2]]

    def experts(self, count: int) -> Tensor:
        """The expert of each place, [places] int64; any for tiles without tokens."""
        return self._experts.long().clamp(0, count - 1).repeat_interleave(self.columns)


def _product(routes: _Routes, kernel: str, matrices: list[DeviceMatrix], x: Tensor, top_k: int) -> Tensor:
    """Multiply the activations of all slots by their experts' matrices.

    Args:
        routes: the schedule.
        kernel: the name of the kernel without the number of columns.
        matrices: one, or gate and up.
        x: [T, C], or [places, C] if `top_k` is 0.
        top_k: experts per token.

    Returns:
        [places, R] float32; places without tokens are not written.
    """
    first, (_, rows, width) = matrices[0], matrices[0].shape
    formats, gpu = [_known(matrix) for matrix in matrices], device_of(first.data)
    program, chunks, places = formats[0].program, -(-width // CHUNK), routes.tiles * routes.columns
    kernels = kernels_of(first.kind)
    assert isinstance(kernels, LayerKernels)
    prepared, units = kernels.scaled(first, x)
    prepared = padded(prepared)
    cells = torch.empty(places * chunks * formats[0].cell_bytes, dtype=torch.uint8, device=x.device)
    scales = torch.empty(places, dtype=torch.float32, device=x.device)
    layout = _LAYOUT(
        x=activations(prepared), routes=routes.struct, cells=cells, scales=scales, units=units, chunks=chunks,
        columns=routes.columns, top_k=top_k,
    )  # fmt: skip
    program.launch("lay_out", places // _LAYOUT_PLACES, _LAYOUT_THREADS, [layout], early=True)
    out = torch.empty((places, rows), dtype=torch.float32, device=x.device)
    row_tiles = -(-rows // (TILE_ROWS // len(matrices)))
    grouped = _GROUPED(
        routes=routes.struct, cells=cells, scales=scales, out=out, rows=rows, chunks=chunks, row_tiles=row_tiles
    )
    arguments: list[Argument] = [grouped, *(each.matrix for each in formats)]
    grid, shared = min(gpu.processors, routes.tiles * row_tiles), gpu.most_shared // 128 * 128
    program.launch(f"{kernel}_{routes.columns}", grid, _THREADS, arguments, shared, early=True)
    return out


def _format(matrix: DeviceMatrix) -> Grouped | None:
    """Return the kernels of a matrix; finding them takes longer than a launch."""
    if "grouped" not in matrix.kept:
        kernels = kernels_of(matrix.kind)
        matrix.kept["grouped"] = kernels.grouped(matrix) if isinstance(kernels, LayerKernels) else None
    found: Grouped | None = matrix.kept["grouped"]
    return found


def _known(matrix: DeviceMatrix) -> Grouped:
    found = _format(matrix)
    assert found is not None
    return found
