"""Drift: earlier layers are compressed, so a layer's inputs differ from those its weights were trained for.

Before quantization, the weights are moved towards those that map the inputs x of the compressed model to the outputs
that the original weights give for the original model's inputs x', a regression over the calibration set:

    W + share * W D (H + d mean(diag H))^-1,    D = sum of a (x' - x) x^T,  H = sum of a x x^T,  a the token's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.arrays import is_finite
from moepack.solvers.gptq import Factors, factorize
from moepack.solvers.products import fast_products

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
    found = weights.clone()
    for expert in range(len(weights)):
        if not bool(drift[expert].any()):
            continue
        # One expert at a time, because the factors of a whole group would determine peak memory.
        own, place = (factors, expert) if factors else (factorize(hessians[expert : expert + 1], damping), 0)
        if own.reasons[place] is not None:
            continue
        root = own.upper[place] * own.pivots[place]  # root root^T is the damped Hessian over its scale
        with fast_products(weights[expert].numel() * drift.shape[-1]):
            moved = torch.mm(weights[expert], drift[expert])
        moved = torch.linalg.solve_triangular(root.mT, moved, upper=False, left=False)
        moved = torch.linalg.solve_triangular(root, moved, upper=True, left=False).mul_(share / own.scale[place])
        if is_finite(moved):
            found[expert] += moved
    return found
