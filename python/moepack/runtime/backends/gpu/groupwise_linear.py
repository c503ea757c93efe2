"""Linear layers of group-wise integers on Hopper: the three launches of `cuda/groupwise_linear.cu`."""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.runtime.backends.gpu.layer import CHUNK, TYPES, Device, padded
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Program

__all__ = ["COLUMNS", "TILE_ROWS", "launch", "pays_from", "program"]

COLUMNS = (8, 16, 32, 64)
"""Tokens of a product: a kernel each."""

TILE_ROWS = 256
_THREADS, _PREPARING, _LANE_COLUMNS = 640, 256, 16
_AHEAD = 4
"""Chunks whose codes a block asks for before activations are there: more would make activations wait."""

_OWN_TOKENS, _OWN_BYTES = 16, 64 << 10
"""Most tokens, and bytes of their cells, that every block lays out for itself instead of a launch before."""

_LINEAR = np.dtype(
    [("x", np.uint64), ("type", np.int32), ("width", np.int32), ("data", np.uint64), ("block_bytes", np.int64)]
    + [(name, np.uint64) for name in ("cells", "scales", "out", "parts")]
    + [(n, np.int32) for n in ("tokens", "columns", "rows", "chunks", "blocks", "items", "ahead", "own")]
)


_SMALL, _LARGE = 1 << 22, 1 << 24
"""Weights of a matrix from which few bits pay with one token, and to which others pay with a few (`pays_from`)."""


def pays_from(matrix: DeviceMatrix) -> int:
    """The least tokens of which these kernels multiply faster than those of layers of experts do, measured on an H100.

    Decoding bounds integers of 2 and 3 bits, and is what these kernels do with fewer instructions. Others decode as
    fast as their bytes come, and gain where they would be decoded twice, for more than 16 tokens. Layers of experts
    take a launch less for a few tokens, one more for the others.
    """
    weights = math.prod(matrix.shape)
    if matrix.details["bits"] <= 3:
        return 1 if weights >= _SMALL else 5
    return 17 if weights >= _LARGE else 5


@cache
def program(bits: int, group: int, symmetric: bool, halves: bool) -> Program:
    """The kernels of a specification (`GroupwiseKernels.specification`)."""
    return Program(
        "groupwise_linear.cu", BITS=bits, GROUP=group, SYMMETRIC=int(symmetric), HALVES=int(halves),
        TOKENS=COLUMNS[-1], RANK_BITS=0,
    )  # fmt: skip


def launch(
    kernels: Program, matrix: DeviceMatrix, base: tuple[int, int], cell_bytes: int, x: Tensor, out: Tensor, gpu: Device
) -> None:
    """Multiply x [N, C], at most 64 tokens, by the only expert, into out [N, R] float32.

    Args:
        kernels: `program` of the matrix's specification.
        matrix: the weights.
        base: the address of the first block of rows, bytes of a block.
        cell_bytes: of a token and a chunk of columns.
        x: bfloat16, float16 or float32.
        out: is written.
        gpu: of all of them.
    """
    x, (_, rows, width) = padded(x), matrix.shape
    tokens, chunks, tiles = len(x), -(-width // CHUNK), -(-rows // TILE_ROWS)
    columns = next(most for most in COLUMNS if most >= tokens)
    items = tiles * chunks
    blocks = min(gpu.processors, max(1, items // 2))
    own = min(-(-items // blocks), chunks)
    if tokens > _OWN_TOKENS or own * columns * cell_bytes > _OWN_BYTES:
        own = 0
    # Cells, scales and the parts of sums of a tile, which so many blocks share at most.
    cells = 0 if own else chunks * columns * cell_bytes
    sizes = cells, 4 * COLUMNS[-1], 4 * tokens * rows * (-(-chunks * blocks // items) + 1)
    starts = np.cumsum([0, *(-(-size // 128) * 128 for size in sizes)]).tolist()
    work = torch.empty(starts[-1], dtype=torch.uint8, device=x.device)
    pointers = [work.data_ptr() + start for start in starts[:3]]
    values = x.data_ptr(), TYPES[x.dtype], x.shape[1], *base, *pointers[:2], out.data_ptr(), pointers[2]
    problem: Any = np.array([(*values, tokens, columns, rows, chunks, blocks, items, _AHEAD, own)], _LINEAR)
    if not own:
        pieces = max(1, min(-(-width // (_PREPARING * _LANE_COLUMNS)), 2 * gpu.processors // tokens))
        kernels.launch("prepare", (pieces, tokens), _PREPARING, [problem], early=True)
    kernels.launch(f"linear_{columns}", blocks, _THREADS, [problem], gpu.most_shared // 128 * 128, early=True)
    kernels.launch("add", (tiles, tokens), TILE_ROWS, [problem], early=True)
