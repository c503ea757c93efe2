"""Importance weights, which make errors of different tensors and experts comparable.

The expected loss increase is the sum of importance times squared error over all matrices. The estimate of an expert's
importance depends on what is known:

| known | importance of an expert |
|---|---|
| the router's k of E | the share of tokens that visit it, k / E (`visits`) |
| how often a text chooses it | its share of all choices over its sum of squares (`relative`, `shares`) |
| its weights alone | its share of all squares over its sum of squares (`relative`): experts chosen often grow in
training |
| its Hessian | the mean diagonal: output error per unit of squared weight error (`curvatures`) |

A dense layer, which every token visits, has importance 1, or 1 over its sum of squares.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moepack.allocation.candidates import Numbers

__all__ = ["curvatures", "evenness", "relative", "shares", "visits"]

LEAST_CURVATURE = 1e-3
"""Minimum importance of an expert relative to the mean, so that prices are finite for experts without tokens."""


def visits(chosen: int, experts: int) -> float:
    """Return the share of tokens that visit an expert if `chosen` of `experts` are chosen uniformly."""
    return chosen / max(experts, 1)


def shares(counts: Sequence[int]) -> Numbers:
    """Return each expert's share of its layer's choices.

    One is added to each count, so that no expert is discarded because a text does not use it.
    """
    smoothed = np.array(counts, np.float64) + 1
    smoothed /= smoothed.sum()
    return smoothed


def relative(squares: Numbers, chosen: Numbers | None = None) -> Numbers:
    """Return the importance of errors relative to the squared weights [E], by shares of choices [E] or of squares."""
    return (squares / squares.sum() if chosen is None else chosen) / squares


def curvatures(diagonals: Tensor) -> Tensor:
    """Return importance [E] from the mean diagonals of Hessians [E].

    Non-finite values count as 0, and 0 as the minimum.
    """
    finite = torch.where(torch.isfinite(diagonals), diagonals, 0.0)
    mean = finite.mean()
    return finite.clamp(min=float(LEAST_CURVATURE * mean)) if mean > 0 else torch.ones_like(finite)


def evenness(importance: Tensor) -> float:
    """Return how evenly experts [E] matter, 1 if all are equal.

    This is the exponential of the entropy of their shares, divided by E.
    """
    part = importance / importance.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.exp(-torch.xlogy(part, part).sum())) / max(len(part), 1)
