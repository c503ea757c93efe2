"""What experts with clamped gates and biases compute between and behind their products, by `cuda/clamped.cu`."""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.base import Between, Clamped
from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import TYPES, Struct

__all__ = ["between", "program", "summed"]

_CLAMPED, _BIASED = Struct("clamped.cu", "Clamped"), Struct("clamped.cu", "Biased")
_THREADS = 256


def between(code: Between, parts: list[Tensor], expert: Tensor, experts: int) -> Tensor:
    """Compute the inputs of the last product: by the kernel for clamped gates, otherwise by the code.

    Args:
        code: of the experts.
        parts: [N, I] float32, the outputs of the other products.
        expert: [N] int64; rows of experts that do not exist may be anything.
        experts: their number.

    Returns:
        [N, I] float32.
    """
    if code.clamped is None:
        return code.between(parts, expert.clamp(0, experts - 1)).contiguous()
    clamped, (first, second) = code.clamped, parts
    rows, columns = first.shape
    inner, bias = torch.empty_like(first), clamped.gate_bias
    argument = _CLAMPED(
        gate=first, up=second, expert=expert, bias=bias, type=0 if bias is None else TYPES[bias.dtype], inner=inner,
        columns=columns, experts=experts, stride=2 if clamped.takes_turns else 1,
        up_at=1 if clamped.takes_turns else columns, alpha=clamped.alpha, limit=clamped.limit,
    )  # fmt: skip
    program().launch("gate", (rows, -(-columns // (4 * _THREADS))), _THREADS, [argument], early=True)
    return inner


def summed(
    clamped: Clamped, outputs: Tensor, index: Tensor, weights: Tensor, experts: int, out: Tensor, place: int = 0
) -> None:
    """Sum the outputs of each token's experts.

    Args:
        clamped: biases and limits.
        outputs: [N, H] float32, of the last product.
        index: [T, k] int64, the experts; those that do not exist are skipped.
        weights: [T, k] float32.
        experts: the number of experts.
        out: [T, H] float32, is written.
        place: the address of the rows of `outputs` that belong to `index`, [T, k] int32, -1 for none; 0 for all rows in
            their order.
    """
    (tokens, top_k), columns, bias = index.shape, outputs.shape[1], clamped.bias
    argument = _BIASED(
        outputs=outputs, place=place, expert=index, weights=weights, bias=bias,
        type=0 if bias is None else TYPES[bias.dtype], out=out, top_k=top_k, columns=columns, experts=experts,
    )  # fmt: skip
    program().launch("sum", (tokens, -(-columns // (4 * _THREADS))), _THREADS, [argument], early=True)


@cache
def program() -> Program:
    """The kernels."""
    return Program("clamped.cu")
