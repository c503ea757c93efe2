"""Scales and offsets that fit codes best, once GPTQ has chosen the codes.

GPTQ takes a group's scale and offset before it rounds the group, when it does not know yet where the errors of the
columns will go. Afterwards, the output error (w - q) H (w - q)^T of a row is a quadratic of its scales and offsets; it
is minimised one group at a time, two unknowns in closed form, in `SWEEPS` sweeps. No step makes the error larger, so
the result is never worse than what GPTQ left, but for the rounding of the stored parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.grids import AffineGrid

__all__ = ["refit_groups"]

#: Sweeps over the groups; the third changes no figure any more.
SWEEPS = 2
#: A group whose codes are all alike has no scale of its own: its normal equations are singular below this determinant,
#: relative to the product of their diagonal.
SINGULAR = 1e-6


def refit_groups(weights: Tensor, codes: Tensor, hessians: Tensor, grid: AffineGrid, damping: float) -> Tensor:
    """Refit the parameters of `grid`, which holds those that `codes` were chosen with.

    Args:
        weights: [E, R, C] float32, what the values should come near.
        codes: [E, R, C].
        hessians: [E, C, C]; an expert's parameters are left alone where they are not finite or all zero.
        grid: its `scales` and `offsets` [E, R, G] are replaced.
        damping: added to the diagonal, relative to its mean.

    Returns:
        The values [E, R, C] of the codes with the new parameters.
    """
    diagonal = hessians.diagonal(dim1=1, dim2=2).mean(1)
    usable = torch.isfinite(hessians).flatten(1).all(1) & (diagonal > 0)
    scaled = torch.where(usable[:, None, None], hessians, 0.0) / torch.where(usable, diagonal, 1.0)[:, None, None]
    scaled.diagonal(dim1=1, dim2=2).add_(damping)
    values = grid.values(codes)
    # What is left of the weights, seen through H: the gradient of the error is -2 times this.
    left = torch.bmm(weights - values, scaled)
    for group in range(grid.scales.shape[-1] * SWEEPS):
        group %= grid.scales.shape[-1]
        part = slice(group * grid.width, min((group + 1) * grid.width, codes.shape[-1]))
        steps = _steps(codes[..., part].float(), left[..., part], scaled[:, part, part])
        scale = grid.stored(grid.scales[..., group] + steps[0] * usable[:, None])
        offset = grid.stored(grid.offsets[..., group] + steps[1] * usable[:, None])
        new = scale[..., None] * codes[..., part] + offset[..., None]
        left -= torch.bmm(new - values[..., part], scaled[:, part])
        grid.scales[..., group], grid.offsets[..., group], values[..., part] = scale, offset, new
    return values


def _steps(codes: Tensor, left: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Changes of scale and offset [E, R] that minimise the error over one group; zero where they are not determined."""
    seen = torch.bmm(codes, hessian)
    cc, c1, one = (seen * codes).sum(-1), seen.sum(-1), hessian.sum((1, 2))[:, None]
    bc, b1 = (left * codes).sum(-1), left.sum(-1)
    determinant = cc * one - c1 * c1
    sound = determinant > SINGULAR * cc * one
    safe = torch.where(sound, determinant, 1.0)
    changes = (bc * one - b1 * c1) / safe, (b1 * cc - bc * c1) / safe
    sound &= torch.isfinite(changes[0]) & torch.isfinite(changes[1])
    return torch.where(sound, changes[0], 0.0), torch.where(sound, changes[1], 0.0)
