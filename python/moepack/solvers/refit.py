"""Refits scales and offsets to the codes that GPTQ chose.

GPTQ fixes a group's scale and offset before it rounds the group, when the errors of its columns are not yet known.
Afterwards, the output error (w - q) H (w - q)^T of a row is quadratic in its scales and offsets. It is minimized one
group at a time, two unknowns in closed form, in `SWEEPS` sweeps. No step increases the error, so the result is never
worse than GPTQ's, except for the rounding of stored parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.grids import AffineGrid

__all__ = ["refit_groups"]

#: Sweeps over the groups; a third sweep changes no measured figure.
SWEEPS = 2
#: A group with equal codes has no scale of its own: its normal equations are singular below this determinant, relative
#: to the product of their diagonal.
SINGULAR = 1e-6


def refit_groups(weights: Tensor, codes: Tensor, hessians: Tensor, grid: AffineGrid, damping: float) -> Tensor:
    """Refit the parameters of `grid`, which holds those that `codes` were chosen with.

    Args:
        weights: [E, R, C] float32, the values to approximate.
        codes: [E, R, C].
        hessians: [E, C, C]; an expert's parameters are kept if its Hessian is not finite or all zero.
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
    # The residual of the weights times H: the gradient of the error is -2 times this.
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
    """Return changes of scale and offset [E, R] that minimize the error over one group; zero if undetermined."""
    seen = torch.bmm(codes, hessian)
    cc, c1, one = (seen * codes).sum(-1), seen.sum(-1), hessian.sum((1, 2))[:, None]
    bc, b1 = (left * codes).sum(-1), left.sum(-1)
    determinant = cc * one - c1 * c1
    sound = determinant > SINGULAR * cc * one
    safe = torch.where(sound, determinant, 1.0)
    changes = (bc * one - b1 * c1) / safe, (b1 * cc - bc * c1) / safe
    sound &= torch.isfinite(changes[0]) & torch.isfinite(changes[1])
    return torch.where(sound, changes[0], 0.0), torch.where(sound, changes[1], 0.0)
