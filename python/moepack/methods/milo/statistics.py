"""Statistics of a matrix for rank policies and `inspect`: kurtosis, residual rank, and error by rank."""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.low_rank import truncated_svd

__all__ = ["kurtosis", "residual_rank", "residual_spectrum"]

RESIDUAL_SHARE = 0.5
"""tau in the paper's table 2."""
FULL_SIDE = 2048
"""Matrices whose smaller side is at most this are fully decomposed (9 s on two cores at 2048 x 8192); for larger ones
only the leading singular values are computed."""
LEADING = 256


def kurtosis(weights: Tensor) -> Tensor:
    """Return the excess kurtosis of each matrix [E, R, C] (MiLo, section 3.1.1, minus 3); 0 for constant matrices."""
    flat = weights.float().flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    centred = centred / centred.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    variance = centred.square().mean(1)
    fourth = centred.square().square().mean(1)
    return torch.where(variance > 0, fourth / variance.square().clamp(min=torch.finfo(torch.float32).tiny) - 3, 0.0)


def residual_spectrum(residual: Tensor) -> Tensor:
    """Return the squared singular values of each residual [E, R, C], descending.

    Large matrices return only the leading 256.
    """
    side = min(residual.shape[1:])
    if side > FULL_SIDE:
        return truncated_svd(residual, LEADING).right.square().sum(2).square()
    tall = residual if residual.shape[1] >= residual.shape[2] else residual.mT
    tall = tall.double() if side <= 512 else tall
    squares: Tensor = torch.linalg.eigvalsh(tall.mT @ tall)
    return squares.flip(1).clamp(min=0).float()


def residual_rank(spectrum: Tensor, side: int) -> list[int | None]:
    """Return how many of `side` singular values are below half of the largest (MiLo, table 2).

    None if some are unknown.
    """
    if spectrum.shape[1] < side:
        return [None] * len(spectrum)
    values = spectrum.sqrt()
    return [int(count) for count in (values < RESIDUAL_SHARE * values[:, :1]).sum(1)]
