"""Draws the next tokens of several sequences where their logits are, without waiting for the host.

The arithmetic is that of `moepack.serving.text.sampling` for temperature, top-k, top-p and min-p, in this order. The
host makes the random numbers, so a sequence gets the same tokens wherever they are drawn, up to the rounding of sums
and to equal logits at the limit of top-p, which are all kept.

Everything has the shape of the logits or less, and nothing depends on values, so that a CUDA graph can record it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["COLDEST", "GREEDY", "LIKELIEST", "UNSURE", "Draw", "draw"]

COLDEST = 1e-6
"""The lowest divisor of logits: float32 logits overflow with less. Sampling is already greedy at this temperature."""

LIKELIEST = 512
"""Number of tokens among which the limits of top-k and top-p are searched."""

UNSURE, _NOT_FINITE = -2, -1
"""Instead of tokens: the likeliest tokens do not have the probability of top-p; a logit is not finite."""

_BLOCK = 256
"""Tokens of a block. Sums of blocks are searched first: scans of a whole row run in a single block of threads."""


class Draw(NamedTuple):
    """How the next token of a sequence is drawn.

    Attributes:
        temperature: of the logits; 0 chooses the likeliest token.
        top_k: keep this many of the likeliest tokens, at most `LIKELIEST`; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to this.
        min_p: exclude tokens below this fraction of the largest probability.
        uniform: the random number, in [0, 1).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Choose a token of each sequence.

    Args:
        logits: [S, V].
        draws: [5, S] float64, the fields of `Draw`.

    Returns:
        [S] int64; `UNSURE` where the host must draw, -1 where logits are not finite.
    """
    temperature, top_k, top_p, min_p, uniform = draws
    scores = logits.float() / temperature.float().clamp(min=COLDEST)[:, None]
    least, unsure = _limits(scores, top_k.long(), top_p.float(), min_p.float())
    weights = scores.masked_fill(scores < least[:, None], -torch.inf).softmax(-1)
    tokens = torch.where(unsure, UNSURE, _inverted(weights, uniform))
    tokens = torch.where(temperature > 0, tokens, logits.argmax(-1))
    return torch.where(logits.isfinite().all(-1), tokens, _NOT_FINITE)


def _limits(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The least score [S] that is kept, and whether it cannot be found among the likeliest tokens."""
    values = scores.topk(min(LIKELIEST, scores.shape[1])).values
    has_k, has_p = top_k > 0, top_p < 1
    of_k = values.gather(1, (top_k.clamp(1, values.shape[1]) - 1)[:, None])
    of_k = torch.where(has_k[:, None], of_k, -torch.inf)
    kept = values.masked_fill(values < of_k, -torch.inf)
    total = torch.where(has_k, kept.logsumexp(-1), scores.logsumexp(-1))
    sums = (kept - total[:, None]).exp().cumsum(-1)
    count = (sums[:, :-1] < top_p[:, None]).sum(-1, keepdim=True)
    of_p = torch.where(has_p, values.gather(1, count)[:, 0], -torch.inf)
    of_min = values[:, 0] + min_p.log()  # -inf without min-p
    unsure = has_p & ~has_k & (sums[:, -1] < top_p) & (values.shape[1] < scores.shape[1])
    return torch.maximum(torch.maximum(of_k[:, 0], of_p), of_min), unsure


def _inverted(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distributions of weights [S, V] at places in [0, 1)."""
    blocks = functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    place = uniform * sums[:, -1] * (1 - 2**-52)  # strictly below the sum
    block = torch.searchsorted(sums, place[:, None], right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0)
    inner = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    found = torch.searchsorted(inner, place[:, None] - before, right=True)
    last = (inner < inner[:, -1:]).sum(-1, keepdim=True)  # with a weight: rounding may exceed the sum of the block
    return (block * _BLOCK + torch.minimum(found, last))[:, 0]
