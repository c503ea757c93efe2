"""Output energy: what layer-wise optimal quantization loses and a model misses.

The minimiser of a quadratic output error shrinks outputs: it trades length for direction, as any regression does. A
deep network minds lost energy more than the same squared error elsewhere, so the levels of each quantized row are
multiplied by the factor that restores the energy of its output on the calibration set.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["energy_factors"]

#: A row that lost more than three quarters of its energy, or gained as much, is not mended by a factor.
LOWEST, HIGHEST = 0.5, 2.0


def energy_factors(weights: Tensor, values: Tensor, hessians: Tensor) -> Tensor:
    """The factors that give quantized rows the output energy of the original ones.

    Args:
        weights: original [E, R, C].
        values: quantized [E, R, C].
        hessians: sums of x^T x, [E, C, C].

    Returns:
        [E, R] float32: sqrt(w H w^T / q H q^T) within [0.5, 2]; 1 where that is no positive finite number.
    """
    factors = (_energy(weights.float(), hessians) / _energy(values.float(), hessians)).sqrt()
    usable = torch.isfinite(factors) & (factors > 0)
    return torch.where(usable, factors.clamp(LOWEST, HIGHEST), 1.0)


def _energy(weights: Tensor, hessians: Tensor) -> Tensor:
    """w H w^T of each row, [E, R], divided by the largest diagonal so that no product overflows.

    The rows are divided, not the Hessians: those are the larger ones, and a second copy of them would be the peak of a
    run's memory.
    """
    scale = hessians.diagonal(dim1=1, dim2=2).abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.bmm(weights / scale[:, None, None], hessians) * weights).sum(2)
