"""Products of a few tokens with dense matrices (`cuda/dense.cu`): up to three in one launch, as of q, k and v."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import Struct

__all__ = ["MOST_TOKENS", "multiply", "program", "supports"]

MOST_TOKENS = 16

_DENSE = Struct("dense.cu", "Dense")
_PARTS = "first", "second", "third"
_ROWS, _STEP = 16, 32
"""Rows of a block, and columns that it reads at once."""

_MANY = 256
"""Blocks that fill the multiprocessors of a large GPU twice; more of them have fewer warps."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


def supports(weights: Sequence[Tensor], tokens: int) -> bool:
    """Whether `multiply` supports matrices [rows, columns] on a GPU for a number of tokens."""
    first = weights[0]
    same = {(each.dtype, each.device, each.shape[1], each.is_contiguous()) for each in weights}
    return (
        0 < tokens <= MOST_TOKENS
        and len(weights) <= len(_PARTS)
        and first.is_cuda
        and first.dtype in _DTYPES
        and len(same) == 1
        and first.is_contiguous()
        and not first.shape[1] % _STEP
        and not any(each.shape[0] % _ROWS or each.data_ptr() % 16 for each in weights)
    )


def multiply(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], warps: int | None = None) -> Tensor:
    """Multiply x [T, C] by the matrices [R, C], below each other: [T, all rows] in the dtype of x.

    `warps` of a block, 4, 8 or 16, determine speed only.
    """
    rows = [len(weight) for weight in weights]
    out = x.new_empty((len(x), sum(rows)))
    members: dict[str, Tensor | int | None] = {}
    for name, weight, bias, count in zip(
        _PARTS, [*weights, None, None], [*biases, None, None], [*rows, 0, 0], strict=False
    ):
        members |= {name: weight, f"{name}_bias": bias, f"{name}_rows": count}
    x, blocks = x.contiguous(), out.shape[1] // _ROWS
    argument = _DENSE(**members, columns=x.shape[1], x=x, out=out, tokens=len(x))
    warps = warps or (4 if blocks > _MANY else 16)
    kernels = program(_DTYPES[x.dtype], 8 if len(x) <= 8 else 16, warps)
    kernels.launch("multiply", blocks, 32 * warps, [argument], early=True)
    return out


@cache
def program(half: int, columns: int, warps: int) -> Program:
    """The kernel for bfloat16 (0) or float16 (1), a number of tokens, and a block's warps."""
    return Program("dense.cu", HALF=half, COLUMNS=columns, TEAM=warps)
