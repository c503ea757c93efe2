"""Drift: earlier layers are compressed, so a layer's inputs differ from those its weights were trained for.

Before quantization, the weights are moved towards those that map the inputs x of the compressed model to the outputs
that the original weights give for the original model's inputs x', a regression over the calibration set:

    W + share * W D (H + d mean(diag H))^-1,    D = sum of a (x' - x) x^T,  H = sum of a x x^T,  a the token's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.gptq import Factors, factorize

__all__ = ["corrected"]


def corrected(
    weights: Tensor, hessians: Tensor, drift: Tensor, share: float, damping: float, factors: Factors | None = None
) -> Tensor:
    """Return weights that undo a share of the drift.

    Args:
        weights: [E, R, C] float32.
        hessians: H of each expert, [E, C, C].
        drift: D of each expert, [E, C, C].
        share: share of the correction, 0 to 1.
        damping: d, relative to the mean diagonal.
        factors: factors of the Hessians with this damping, if already computed.

    Returns:
        [E, R, C]. An expert whose regression cannot be solved, or overflows, keeps its weights.
    """
    factors = factors or factorize(hessians, damping)
    usable = torch.tensor([reason is None for reason in factors.reasons], device=drift.device)
    scale = torch.tensor(factors.scale, device=drift.device)
    moved = weights @ torch.where(usable[:, None, None], drift, 0.0)
    root = factors.upper * factors.pivots[:, None, :]  # root root^T is the damped Hessian over its scale
    moved = torch.linalg.solve_triangular(root.mT, moved, upper=False, left=False)
    moved = torch.linalg.solve_triangular(root, moved, upper=True, left=False)
    moved = moved / torch.where(usable, scale, 1.0)[:, None, None]
    sound = (usable & torch.isfinite(moved).flatten(1).all(1))[:, None, None]
    return weights + share * torch.where(sound, moved, 0.0)
