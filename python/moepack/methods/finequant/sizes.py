"""Group sizes: the packed size of each, and the paper's adaptive rule.

A group size is a number of columns, or None for the whole row. It is chosen per stored tensor: a projection of all
experts of a layer, or a linear layer.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from moepack import _core
from moepack.methods.base import Shape
from moepack.solvers.widths import BITS, GROUP_SIZES

__all__ = ["GroupSize", "free_size", "halving_ratios", "halvings", "packed_bytes", "sizes_for", "stored_size"]

GroupSize = int | None


def packed_bytes(shape: Shape, bits: int, size: GroupSize, symmetric: bool = True) -> int:
    """Return the packed size of a tensor in bytes (docs/format.md, section 6); parameters have 16 bits."""
    group_size = size or max(shape[2], 1)
    return _core.packed_bytes("groupwise", shape, bits=bits, group_size=group_size, symmetric=symmetric)


def sizes_for(columns: int) -> tuple[GroupSize, ...]:
    """Return the distinct group sizes for rows of `columns` columns, coarsest first."""
    return None, *(size for size in reversed(GROUP_SIZES) if size < columns)


def halvings(columns: int) -> list[int]:
    """Return the widths of the paper's rule: the row, then powers of two down to the smallest group."""
    widths = [columns]
    while (half := 1 << (widths[-1] - 1).bit_length() >> 1) >= GROUP_SIZES[0]:
        widths.append(half)
    return widths


def halving_ratios(weight: torch.Tensor) -> NDArray[np.float64]:
    """Return, for each halving, the smallest range of a group relative to its parent group.

    Args:
        weight: `[R, C]`, finite.

    Returns:
        A ratio in [0, 1] for each width of `halvings` except the first; parents that are zero give 1.
    """
    widths = halvings(weight.shape[1])
    amax = [_group_max(weight.float().abs(), widths[-1])]
    for finer, width in pairwise(reversed(widths)):
        amax.insert(0, _group_max(amax[0], -(-width // finer)))
    ratios = []
    for parent, child in pairwise(amax):
        fan = -(-child.shape[1] // max(parent.shape[1], 1))
        above = parent.repeat_interleave(fan, dim=1)[:, : child.shape[1]]
        ratio = torch.where(above > 0, child / above, torch.ones_like(child))
        ratios.append(float(ratio.numpy().min(initial=1.0)))
    return np.array(ratios)


def _group_max(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the maximum of each run of `width` non-negative columns; the last run may be shorter."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % width))
    return padded.reshape(len(values), -1, width).amax(-1) if values.numel() else values[:, :0]


def stored_size(columns: int, ratios: Sequence[float] | NDArray[np.float64], alpha: float) -> GroupSize:
    """Return the group size of the paper's rule: halve while the ratio of ranges falls below `alpha`.

    (As printed, the rule halves while *any* ratio of a new range to the old one is *above* alpha, which never ends: the
    half that contains the maximum always has ratio 1.)

    Args:
        columns: number of columns of the matrix.
        ratios: result of `halving_ratios`.
        alpha: in (0, 1).

    Returns:
        The coarsest group size of the format that is no coarser than the rule's result.
    """
    widths = halvings(columns)
    end = next((at for at, ratio in enumerate(ratios) if ratio >= alpha), len(ratios))
    return min(max(GROUP_SIZES), widths[end]) if end else None


def free_size(shape: Shape, size: GroupSize, symmetric: bool = True) -> GroupSize:
    """Return the smallest group size that takes no more bytes than `size`.

    Parameters of 16 rows fill whole registers, so the scales of two groups may take no more space than those of one.
    """
    bits = BITS[0]  # codes take the same bytes at every size
    limit = packed_bytes(shape, bits, size, symmetric)
    free = [other for other in sizes_for(shape[2]) if packed_bytes(shape, bits, other, symmetric) <= limit]
    return free[-1] if free else size
