"""Round-to-nearest on grids of powers of two: the log-scale quantization that FineQuant compares with (appendix A).

A weight is `sign * scale * 2^-k` with k in 0 .. 2^(b-1) - 1: one bit for the sign, b - 1 for the exponent. There is no
zero; the smallest magnitude represents it. Exponents are rounded to the nearest *value*: 2^-k covers the range from 3/4
to 3/2 of it, which is the paper's `ceil(log2(2/3 T))`. (Its `clip` names the bounds in reverse.)

The scale is the paper's second choice, with the least squared error: a ladder proposes codes q, and their scale is the
projection `<w, q> / <q, q>`, as on uniform grids. The packed format does not support this grid: at two bits it is worse
than uniform steps, and its products need a table or a shift for each weight.
"""

import torch
from torch import Tensor

from moepack.errors import InvalidTensorError

__all__ = ["round_logarithmic"]

_LADDER = (0.2, 1.4, 49)
"""The scales tried, relative to the largest magnitude: first, last, and number."""


def round_logarithmic(weight: Tensor, bits: int, group_size: int | None = None, *, search: bool = True) -> Tensor:
    """Round a matrix to the nearest values of a logarithmic grid.

    Args:
        weight: `[..., R, C]`, floating-point, finite.
        bits: 2 to 8.
        group_size: columns that share a scale, a divisor of C; None for the whole row.
        search: find the scale with the least squared error; otherwise it is the largest magnitude.

    Returns:
        The rounded values, float32 with the same shape; groups of zeros stay zero.

    Raises:
        InvalidTensorError: the weight contains NaN or infinity.
        ValueError: the grid is not supported.
    """
    width = group_size or max(weight.shape[-1], 1)
    if not 2 <= bits <= 8 or weight.shape[-1] % width:
        raise ValueError(f"no logarithmic grid of {bits} bits in groups of {width} of {weight.shape[-1]} columns")
    values = weight.float()
    if not bool(values.isfinite().all()):
        raise InvalidTensorError("holds NaN or infinity")
    groups = values.reshape(*values.shape[:-1], -1, width) if values.numel() else values[..., None]
    largest = groups.abs().amax(-1, keepdim=True) if values.numel() else groups
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    scale = _searched(groups / unit, bits) if search else torch.ones_like(unit)
    rounded = _powers(groups / unit, scale, bits) * (scale * unit)
    return torch.where(largest > 0, rounded, torch.zeros_like(rounded)).reshape(values.shape)


def _powers(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the signed powers of two, from 2^(1 - 2^(bits - 1)) to 1, nearest to `values / scale`."""
    least = 1 - 2 ** (bits - 1)
    ratio = (values.abs() / scale).clamp(2.0**least, 1.0)
    power = torch.exp2((ratio * (2 / 3)).log2().ceil().clamp(least, 0))
    return torch.where(values < 0, -power, power)


def _searched(values: Tensor, bits: int) -> Tensor:
    """Return the scale of each group of values in [-1, 1] with the least squared error."""
    best = torch.full_like(values[..., :1], -1.0)
    scale = torch.ones_like(best)
    for step in torch.linspace(*_LADDER).tolist():
        codes = _powers(values, torch.full_like(best, step), bits)
        share, energy = (codes * values).sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True)
        explained = share.square() / energy
        scale = torch.where(explained > best, share / energy, scale)
        best = torch.maximum(best, explained)
    return scale.clamp(min=2.0**-20)
