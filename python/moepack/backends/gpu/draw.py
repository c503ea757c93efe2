"""The choice of tokens from logits by `cuda/draw.cu`, in one launch."""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program, is_hopper
from moepack.backends.gpu.structs import TYPES, Struct

__all__ = ["draw", "program"]

_DRAW = Struct("draw.cu", "Draw")
_THREADS, _TEAM_THREADS = 1024, 512
"""Threads of a block, alone and in a team."""

_WIDE, _BLOCKS = 16384, 8
"""Rows of this many logits have a team of blocks, a cluster."""


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Choose a token of each row.

    Args:
        logits: [S, V], bfloat16, float16 or float32.
        draws: [5, S] float64: temperatures, 0 for the likeliest token; top-k, 0 for all; top-p; min-p; random numbers
            in [0, 1).

    Returns:
        [S] int64, -1 where a logit is not finite.
    """
    logits, (rows, columns) = logits.contiguous(), logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    blocks = _BLOCKS if columns >= _WIDE and is_hopper(logits.device.index) else 1
    argument = _DRAW(
        logits=logits, type=TYPES[logits.dtype], draws=draws.contiguous(), tokens=tokens, rows=rows, columns=columns,
        blocks=blocks,
    )  # fmt: skip
    threads = _TEAM_THREADS if blocks > 1 else _THREADS
    program().launch("choose", rows * blocks, threads, [argument], early=True, cluster=blocks)
    return tokens


@cache
def program() -> Program:
    """The kernel."""
    return Program("draw.cu")
