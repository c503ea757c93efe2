"""Layers of experts with many tokens on Hopper: the launches of `cuda/common/grouped.cuh`.

Kernels sort the tokens by expert and decode weights for up to 64 tokens of an expert at once. The host only needs the
shapes, so nothing synchronizes and calls can be captured in a CUDA graph.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from moepack.backends.base import Between
from moepack.backends.gpu import clamped
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.layer import CHUNK, Grouped, LayerKernels, device_of, padded
from moepack.backends.gpu.linear import TILE_ROWS
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.routes import COUNTED_EXPERTS, ROUTES, Routes
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, activations

__all__ = ["CHUNK", "add", "calls", "experts", "product", "supports", "supports_own"]

_LAYOUT = Struct("common/grouped.cuh", "Layout", Activations=ACTIVATIONS, Routes=ROUTES)
_GROUPED = Struct("common/grouped.cuh", "Grouped", Routes=ROUTES)

_COLUMNS = {16: 10, 32: 24, 64: 1 << 31}
"""Tokens per product, and the most tokens per expert on average for which they are used: most experts then have their
tokens in one tile, and few columns are empty."""

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
    if matrices[0].shape[0] > COUNTED_EXPERTS or not matrices[0].data.is_cuda:
        return False
    return device_of(matrices[0].data).has_warpgroups and None not in map(_format, matrices)


def experts(
    matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, code: Between | None = None
) -> Tensor:
    """Sum the outputs of each token's experts; arguments and result as in `Backend.experts`, on one GPU.

    With `code`, as in `Backend.own_experts`.
    """
    out = torch.empty((len(x), matrices[-1].shape[1]), dtype=torch.float32, device=x.device)
    for tokens in calls(out, index.shape[1]):
        _experts(matrices, x[tokens], index[tokens], weights[tokens], out[tokens], code)
    return out


def calls(out: Tensor, top_k: int) -> Iterator[slice]:
    """Split the tokens of out [T, H], with `top_k` experts each, so that the outputs of a call fit in memory."""
    step = max(1, OUTPUT_BYTES // (4 * out.shape[1] * top_k))
    return (slice(first, first + step) for first in range(0, len(out), step))


def _experts(
    matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, out: Tensor, code: Between | None
) -> None:
    """Launch a layer: write to out [T, H] float32."""
    *first, down = matrices
    slots, top_k, count = index.numel(), index.shape[1], down.shape[0]
    columns = next(columns for columns, mean in _COLUMNS.items() if slots <= mean * count)
    routes, program = Routes(index, count, columns), _known(down).program
    routes.sort(program)
    if code is None:
        hidden = _product(routes, "gated", first, x, top_k)
        outputs = _product(routes, "project", [down], hidden, 0)
    else:
        expert, parts = routes.experts(), [_product(routes, "project", [matrix], x, top_k) for matrix in first]
        hidden = clamped.between(code, parts, expert, count)
        outputs = _product(routes, "project", [down], hidden, 0)
        if code.clamped is not None:
            clamped.summed(code.clamped, outputs, index, weights, count, out, routes.place)
            return
        outputs = code.behind(outputs, expert).contiguous()
    add(program, routes, outputs, weights, out)


def add(program: Program, routes: Routes, outputs: Tensor, weights: Tensor, out: Tensor) -> None:
    """Sum outputs [places, H] of each token times weights [T, k] to out [T, H]."""
    tokens, rows = out.shape
    grid = (-(-rows // (4 * _ADD_THREADS)), tokens)
    arguments: list[Argument] = [np.uint64(routes.place), weights, outputs, out, weights.shape[1], rows]
    program.launch("add", grid, _ADD_THREADS, arguments, early=True)


def _product(routes: Routes, kernel: str, matrices: list[DeviceMatrix], x: Tensor, top_k: int) -> Tensor:
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
    first, kernels = matrices[0], kernels_of(matrices[0].kind)
    assert isinstance(kernels, LayerKernels)
    prepared, units = kernels.scaled(first, x)
    return product(routes, kernel, [_known(matrix) for matrix in matrices], first.shape, padded(prepared), units, top_k)


def product(
    routes: Routes,
    kernel: str,
    formats: Sequence[Grouped],
    shape: tuple[int, int, int],
    x: Tensor,
    units: Tensor | None,
    top_k: int,
) -> Tensor:
    """Multiply activations by matrices of a shape, as `_product` does; `units` are factors of rows of x, or None."""
    (_, rows, width), gpu = shape, device_of(x)
    program, chunks, places = formats[0].program, -(-width // CHUNK), routes.tiles * routes.columns
    cells = torch.empty(places * chunks * formats[0].cell_bytes, dtype=torch.uint8, device=x.device)
    scales = torch.empty(places, dtype=torch.float32, device=x.device)
    layout = _LAYOUT(
        x=activations(x), routes=routes.struct, cells=cells, scales=scales, units=units, chunks=chunks,
        columns=routes.columns, top_k=top_k,
    )  # fmt: skip
    program.launch("lay_out", places // _LAYOUT_PLACES, _LAYOUT_THREADS, [layout], early=True)
    out = torch.empty((places, rows), dtype=torch.float32, device=x.device)
    row_tiles = -(-rows // (TILE_ROWS // len(formats)))
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
