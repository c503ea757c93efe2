"""Refits scales and offsets to the codes that GPTQ chose.

GPTQ fixes a group's scale and offset before it rounds the group, when the errors of its columns are not yet known.
Afterwards, the output error (w - q) H (w - q)^T of a row is quadratic in its scales and offsets. It is minimized one
group at a time, two unknowns in closed form, in `SWEEPS` sweeps. No step increases the error, so the result is never
worse than GPTQ's, except for the rounding of stored parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.grids import AffineGrid, stored

__all__ = ["best_parameters", "refit_groups"]

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
        scale, offset = grid.scales[..., group], grid.offsets[..., group]
        found = best_parameters(
            codes[..., part].float(), left[..., part], scaled[:, part, part], scale, offset, grid.storage
        )
        scale = torch.where(usable[:, None], found[0], scale)
        offset = offset if found[1] is None else torch.where(usable[:, None], found[1], offset)
        new = scale[..., None] * codes[..., part] + offset[..., None]
        left -= torch.bmm(new - values[..., part], scaled[:, part])
        grid.scales[..., group], grid.offsets[..., group], values[..., part] = scale, offset, new
    return values


def best_parameters(
    codes: Tensor, left: Tensor, hessian: Tensor, scale: Tensor, offset: Tensor | None, storage: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scale and offset of a group that minimize the output error, rounded as stored.

    Args:
        codes: [E, R, width], in steps of the scale.
        left: [E, R, width], the residual of all weights times the Hessian, in the group's columns.
        hessian: [E, width, width].
        scale, offset: [E, R], the present parameters; no offset for a symmetric group.
        storage: dtype of the stored parameters.

    Returns:
        The parameters [E, R]; the present ones where none are better, or the codes do not determine any.
    """
    seen = torch.bmm(codes, hessian)
    cc, bc = (seen * codes).sum(-1), (left * codes).sum(-1)
    if offset is None:
        sound = cc > 0
        rise = torch.where(sound, bc / torch.where(sound, cc, 1.0), 0.0)
        new = stored(scale + rise, storage)
        rise = new - scale
        return torch.where(rise * (2 * bc - rise * cc) > 0, new, scale), None
    c1, one, b1 = seen.sum(-1), hessian.sum((1, 2))[:, None], left.sum(-1)
    determinant = cc * one - c1 * c1
    sound = determinant > SINGULAR * cc * one
    safe = torch.where(sound, determinant, 1.0)
    steps = (bc * one - b1 * c1) / safe, (b1 * cc - bc * c1) / safe
    pair = [stored(old + step, storage) for old, step in zip((scale, offset), steps, strict=True)]
    rise, shift = pair[0] - scale, pair[1] - offset
    better = rise * (2 * bc - rise * cc) + shift * (2 * b1 - shift * one) - 2 * rise * shift * c1 > 0
    return torch.where(sound & better, pair[0], scale), torch.where(sound & better, pair[1], offset)
