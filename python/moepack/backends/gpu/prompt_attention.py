"""Attention of prompts by `cuda/prompt.cu`: rows of several sequences, with grouped heads and without copies."""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.rooms import ROOMS, Rooms
from moepack.backends.gpu.structs import Struct

__all__ = ["attend", "program", "supports", "tile_rows"]

_PROMPT = Struct("prompt.cu", "Prompt", Rooms=ROOMS)
_KEYS, _PADDING, _SCALE = 64, 8, 4
"""Tokens in shared memory, columns between their rows, and bytes of a scale."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1}
_WIDTHS = (64, 128)


def supports(dtype: torch.dtype, width: int) -> bool:
    """Whether `attend` supports heads of a width."""
    return dtype in _DTYPES and width in _WIDTHS


def tile_rows(group: int) -> int:
    """Rows of a tile for `group` heads that share keys and values."""
    return 16 * _division(group)[1]


def attend(queries: Tensor, rooms: Rooms, groups: int, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Attend to a token and the earlier ones of its sequence, as far as the window of `rooms` extends.

    Args:
        queries: [R, heads, D], bfloat16 or float16. Each tile of `tile_rows` rows belongs to one sequence, in order;
            only the last rows of a tile may have no token.
        rooms: keys and values of the same width, in the same dtype or in 8 bits, which hold those of all rows.
        groups: of heads that share keys and values.
        scale: of the scores.
        sinks: [heads], scores that take part in the sums only.

    Returns:
        [R, heads, D], zeros for rows without a token in tiles without tokens.
    """
    rows, heads, width = queries.shape
    in_block, parts = _division(heads // groups)
    out = torch.empty_like(queries)
    argument = _PROMPT(
        queries=queries, sinks=sinks, out=out, rooms=rooms.struct(), groups=groups, group=heads // groups,
        scale=scale,
    )  # fmt: skip
    grid = rows // (16 * parts), groups * -(-(heads // groups) // in_block)
    operands = 2 * _KEYS * (width + _PADDING) * 2  # a stage of keys and values
    shared = operands + 4 * _KEYS * (width + _SCALE) if rooms.narrow else 2 * operands
    kernels = program(_DTYPES[queries.dtype], rooms.narrow, width, in_block, parts)
    kernels.launch("attend", grid, 32 * in_block * parts, [argument], shared, early=True)
    return out


def _division(group: int) -> tuple[int, int]:
    """Heads of a block, and warps per head: eight warps if possible, and at most 64 rows."""
    heads = min(group, 8)
    return heads, max(1, min(4, 8 // heads))


@cache
def program(half: int, narrow: bool, width: int, heads: int, parts: int) -> Program:
    """The kernel for bfloat16 (0) or float16 (1), rooms of 8 bits, columns and heads of a block, warps per head."""
    return Program("prompt.cu", HALF=half, NARROW=int(narrow), WIDTH=width, HEADS=heads, PARTS=parts)
