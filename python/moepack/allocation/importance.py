"""How much an error counts: what makes errors of different tensors and experts comparable.

The expected rise of the loss is the sum of importance times squared error over all matrices. What is known of an expert
decides how its importance is estimated:

| known | importance of an expert |
|---|---|
| the router's k of E | the share of tokens that visit it, k / E (`visits`) |
| how often a text chooses it | its share of all choices over its squares (`relative`, `shares`) |
| its weights alone | its share of all squares over its squares (`relative`): experts chosen often grow in training |
| its Hessian | the mean diagonal: output error for a unit of squared weight error (`curvatures`) |

A dense layer, which every token visits, counts 1, or 1 over its squares.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moepack.allocation.candidates import Numbers

__all__ = ["curvatures", "evenness", "relative", "shares", "visits"]

LEAST_CURVATURE = 1e-3
"""Importance of an expert is at least this part of the mean: finite prices for experts that no token reached."""


def visits(chosen: int, experts: int) -> float:
    """The share of tokens that visit an expert where `chosen` of `experts` are chosen alike."""
    return chosen / max(experts, 1)


def shares(counts: Sequence[int]) -> Numbers:
    """Each expert's share of its layer's choices; each counts once more than it was chosen, so that none is written
    off for a text that does not need it."""
    smoothed = np.array(counts, np.float64) + 1
    smoothed /= smoothed.sum()
    return smoothed


def relative(squares: Numbers, chosen: Numbers | None = None) -> Numbers:
    """Importance of errors as a part of the weights' squares [E]: by shares of choices [E], or of all squares."""
    return (squares / squares.sum() if chosen is None else chosen) / squares


def curvatures(diagonals: Tensor) -> Tensor:
    """Importance [E] by the mean diagonals of Hessians [E]; what is not finite counts as 0, and 0 as little."""
    finite = torch.where(torch.isfinite(diagonals), diagonals, 0.0)
    mean = finite.mean()
    return finite.clamp(min=float(LEAST_CURVATURE * mean)) if mean > 0 else torch.ones_like(finite)


def evenness(importance: Tensor) -> float:
    """How evenly experts [E] matter: the exponential of the entropy of their shares, over E; 1 if all do alike."""
    part = importance / importance.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.exp(-torch.xlogy(part, part).sum())) / max(len(part), 1)
