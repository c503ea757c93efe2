"""A router's choice of experts in one launch (`cuda/router.cu`)."""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import TYPES, Struct

__all__ = ["MOST_CHOICES", "MOST_EXPERTS", "choose", "program"]

MOST_EXPERTS, MOST_CHOICES = 512, 32
"""A lane has at most 16 scores, and each lane writes one choice."""

_CHOICE = Struct("router.cu", "Choice")


def choose(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    normalized: bool = False,
    correction: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by their scores.

    Args:
        logits: [T, E], bfloat16, float16 or float32; E is at most `MOST_EXPERTS`.
        top_k: experts per token, at most `MOST_CHOICES`.
        sigmoid: whether scores are sigmoids instead of a softmax.
        normalized: whether the weights of a token are divided by their sum.
        correction: [E] float32, added to the scores for the choice only.
        scale: of the weights.

    Returns:
        Experts [T, top_k], int64, and weights [T, top_k], float32, rounded to the dtype of the logits.
    """
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    index = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        argument = _CHOICE(
            logits=logits, type=TYPES[logits.dtype], correction=correction, index=index, weights=weights, tokens=tokens,
            experts=experts, top_k=top_k, sigmoid=int(sigmoid), normalized=int(normalized), scale=scale,
        )  # fmt: skip
        program(-(-experts // 32)).launch("choose", tokens, 32, [argument], early=True)
    return index, weights


@cache
def program(scores: int) -> Program:
    """The kernel for a number of scores per lane."""
    return Program("router.cu", SCORES=scores)
