"""Restores the output energy that layer-wise optimal quantization loses.

The minimizer of a quadratic output error shrinks outputs, as any regression does. A deep network suffers more from lost
energy than from the same squared error elsewhere. So the levels of each quantized row are multiplied by the factor that
restores the energy of its output on the calibration set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moepack.solvers.products import fast_products

__all__ = ["energy_factors"]

#: Factors are limited to this range: a factor cannot repair a row that lost more than three quarters of its energy.
LOWEST, HIGHEST = 0.5, 2.0


def energy_factors(weights: Tensor, values: Tensor, hessians: Tensor) -> Tensor:
    """Return the factors that give quantized rows the output energy of the original rows.

    Args:
        weights: original [E, R, C].
        values: quantized [E, R, C].
        hessians: sums of x^T x, [E, C, C].

    Returns:
        [E, R] float32: sqrt(w H w^T / q H q^T) within [0.5, 2]; 1 if that is not a positive finite number.
    """
    factors = (_energy(weights.float(), hessians) / _energy(values.float(), hessians)).sqrt()
    usable = torch.isfinite(factors) & (factors > 0)
    return torch.where(usable, factors.clamp(LOWEST, HIGHEST), 1.0)


def _energy(weights: Tensor, hessians: Tensor) -> Tensor:
    """Return w H w^T of each row, [E, R], divided by the largest diagonal entry so that no product overflows.

    The rows are divided instead of the Hessians, which are larger: a second copy of them would determine peak memory.
    """
    scale = hessians.diagonal(dim1=1, dim2=2).abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    with fast_products(math.prod(weights.shape[1:]) * hessians.shape[-1]):
        return (torch.bmm(weights / scale[:, None, None], hessians) * weights).sum(2)
