"""Linear layers with up to 64 tokens on Hopper: the three launches of `cuda/common/linear.cuh`."""

import math

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu.layer import CHUNK, Device, padded
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, StructValue, activations

__all__ = ["COLUMNS", "TILE_ROWS", "arguments", "calls", "launch"]

COLUMNS = (8, 16, 32, 64)
"""Tokens per product; each has its own kernel."""

TILE_ROWS = 256
_THREADS, _PREPARING, _LANE_COLUMNS = 640, 512, 16
_AHEAD = 4
"""Chunks whose codes a block requests before activations are available; more would delay the activations."""

_OWN_TOKENS, _OWN_BYTES = 16, 64 << 10
"""The most tokens, and bytes of their cells, that every block lays out itself instead of a preceding launch."""


def arguments(matrix: Struct) -> Struct:
    """The kernels' `Linear` structure for a Format's `Matrix` structure."""
    return Struct("common/linear.cuh", "Linear", Activations=ACTIVATIONS, Matrix=matrix)


_LARGE = 1 << 25
"""Weights of a matrix from which several calls are faster than decoding; on an H100, they are with 2^26 and not with
2^22."""


def calls(matrix: DeviceMatrix, most: int) -> int:
    """The most calls that are faster than decoding a matrix; `most` for large ones."""
    return most if math.prod(matrix.shape) >= _LARGE else 1


def launch(
    kernels: Program,
    matrix: DeviceMatrix,
    linear: Struct,
    struct: StructValue,
    cell_bytes: int,
    x: Tensor,
    out: Tensor,
    gpu: Device,
    units: Tensor | None = None,
) -> None:
    """Multiply x [N, C], at most 64 tokens, by the single expert; write to out [N, R] float32.

    Args:
        kernels: the kernels for the matrix's specification.
        matrix: the weights.
        linear: the kernels' `Linear` structure.
        struct: the Format's `Matrix` structure.
        cell_bytes: bytes of a cell, which holds a token's chunk of columns.
        x: bfloat16, float16 or float32.
        out: written.
        gpu: the GPU of all tensors.
        units: [N] float32, scales of each token's values; None if the values are unscaled.
    """
    x, (_, rows, width) = padded(x), matrix.shape
    tokens, chunks, tiles = len(x), -(-width // CHUNK), -(-rows // TILE_ROWS)
    columns = next(most for most in COLUMNS if most >= tokens)
    items = tiles * chunks
    blocks = min(gpu.processors, max(1, items // 2))
    own = min(-(-items // blocks), chunks)
    if tokens > _OWN_TOKENS or own * columns * cell_bytes > _OWN_BYTES:
        own = 0
    # Cells, scales, and partial sums for the largest number of blocks that share a tile.
    cells = 0 if own else chunks * columns * cell_bytes
    sizes = cells, 4 * COLUMNS[-1], 4 * tokens * rows * (-(-chunks * blocks // items) + 1)
    starts = np.cumsum([0, *(-(-size // 128) * 128 for size in sizes)]).tolist()
    work = torch.empty(starts[-1], dtype=torch.uint8, device=x.device)
    pointers = [work.data_ptr() + start for start in starts[:3]]
    problem = linear(
        x=activations(x), matrix=struct, cells=pointers[0], scales=pointers[1], units=units, out=out, parts=pointers[2],
        tokens=tokens, columns=columns, rows=rows, chunks=chunks, blocks=blocks, items=items, ahead=_AHEAD, own=own,
    )  # fmt: skip
    if not own:
        pieces = max(1, min(-(-width // (_PREPARING * _LANE_COLUMNS)), 2 * gpu.processors // tokens))
        kernels.launch("prepare", (pieces, tokens), _PREPARING, [problem], early=True)
    kernels.launch(f"linear_{columns}", blocks, _THREADS, [problem], gpu.most_shared // 128 * 128, early=True)
    kernels.launch("add", (tiles, tokens), TILE_ROWS, [problem], early=True)
