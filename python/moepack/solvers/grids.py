"""Grids for GPTQ: ternary rows, affine groups and symmetric groups.

A grid knows the allowed values of a weight and nothing about error compensation; :func:`moepack.solvers.gptq.gptq`
calls it column by column. Grid parameters are rounded to their stored dtype *before* the first weight is rounded, so
that the solver compensates exactly the values that a reader reconstructs.

Shapes: E experts, R rows (outputs), C columns (inputs), G groups of columns. All tensors are float32 unless stated
otherwise and are on the device of the weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moepack.solvers.groupwise import quantize_groupwise

#: Shares of a group's range that a search tries besides the whole range.
NARROWINGS = tuple(1.0 - 0.05 * step for step in range(1, 11))
#: Number of subsequent least-squares fits; further ones reduce the error by less than 0.1 %.
LINES = 4


class Grid(Protocol):
    """The interface between the solver and a grid. One instance serves one batch of weights.

    ``group_size`` is the number of columns that share parameters fitted to the *compensated* weights: the solver then
    calls :meth:`enter` before the first column of each group. ``None`` means that :meth:`fit` sets all parameters.
    """

    group_size: int | None

    def fit(self, weights: Tensor) -> None:
        """Choose the parameters from the original weights [E, R, C]."""

    def enter(self, start: int, weights: Tensor) -> None:
        """Choose the parameters of the group that starts at column ``start`` from its weights [E, R, width]."""

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Round one column of every expert.

        Args:
            values: [E, R], the compensated weights.
            columns: [E] int64, each expert's current column in the original matrix.
            curvature: [E], the loss per unit of squared rounding error in this column (p_j^2 of `gptq`), for grids that
                trade error against something else; plain rounding ignores it.

        Returns:
            codes [E, R] (int8 or uint8) and their values [E, R].
        """


class TernaryGrid:
    """The row grid {min, 0, max} of the original weights (QMoE, section 4.1).

    A value beyond half a level is rounded to that level, every other value to zero; the range is extended to include
    zero. Codes are int8: -1, 0, 1. ``levels`` [E, R, 2] holds (negative, positive), rounded to ``storage``.
    """

    group_size: int | None = None

    def __init__(self, storage: torch.dtype = torch.bfloat16) -> None:
        self.storage = storage
        self.levels = torch.empty(0)

    def fit(self, weights: Tensor) -> None:
        """Take the minimum and maximum of each row; a row without columns has the levels (0, 0)."""
        if weights.shape[-1] == 0:
            self.levels = weights.new_zeros((*weights.shape[:-1], 2))
            return
        low, high = torch.aminmax(weights, dim=-1)
        levels = torch.stack([low.clamp(max=0), high.clamp(min=0)], dim=-1)
        self.levels = stored(levels, self.storage)

    def enter(self, start: int, weights: Tensor) -> None:
        """Do nothing: the levels belong to the original row."""

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Round to the nearest of the three levels; ties go to zero."""
        low, high = self.levels.unbind(-1)
        above, below = values > 0.5 * high, values < 0.5 * low
        codes = above.to(torch.int8) - below.to(torch.int8)
        zero = values.new_zeros(())
        return codes, torch.where(above, high, torch.where(below, low, zero))


class AffineGrid:
    """``scale * code + offset`` with 2^bits codes per group of columns or per row; asymmetric.

    The offset is the group's minimum and ``offset + (2^bits - 1) * scale`` its maximum. A constant group has scale zero
    and its value as the offset. Codes are uint8; ``scales`` and ``offsets`` are [E, R, G], rounded to ``storage``.

    With ``search``, a group's range is first narrowed around its middle by the factor among 1.0, 0.95, ... 0.5 with the
    least squared error: with few bits, a finer step gains more than the outermost weights lose. (At 2 bits the best
    uniform step for Gaussian weights is 0.62 of that of 64 weights' minimum and maximum.) Then the least-squares line
    through the codes and the nearest codes are alternated while the error decreases.

    Args:
        bits: 1 to 8.
        group: columns per group, or ``None`` for one group per row.
        static: fit every group to the original weights instead of the compensated ones. Required for act-order, whose
            groups are not contiguous in time; one group per row is always static.
        search: minimize each group's squared error.
        storage: dtype of the stored parameters.
    """

    def __init__(
        self,
        bits: int,
        group: int | None = None,
        *,
        static: bool = False,
        search: bool = False,
        storage: torch.dtype = torch.float16,
    ) -> None:
        if not 1 <= bits <= 8:
            raise ValueError(f"bits must be 1 to 8, not {bits}")
        if group is not None and group < 1:
            raise ValueError(f"a group must have at least one column, not {group}")
        self.levels = 2**bits - 1
        self.group = group
        self.group_size = None if static else group
        self.storage = storage
        self.search = search
        self.scales = self.offsets = torch.empty(0)

    def fit(self, weights: Tensor) -> None:
        """Allocate the parameters and fit every group (dynamic groups are fitted again on entry)."""
        experts, rows, columns = weights.shape
        width = self.group or max(columns, 1)
        groups = -(-columns // width)
        self.width = width
        self.scales = weights.new_zeros((experts, rows, groups))
        self.offsets = torch.zeros_like(self.scales)
        for group in range(groups):
            self._take(group, weights[..., group * width : (group + 1) * width])

    def enter(self, start: int, weights: Tensor) -> None:
        """Refit the group that starts at ``start`` to its compensated weights."""
        self._take(start // self.width, weights)

    def _take(self, group: int, weights: Tensor) -> None:
        low, high = torch.aminmax(weights, dim=-1)
        best = self._narrowed(low, high, 1.0)
        if self.search:
            least = self._error(weights, *best)
            for narrowing in NARROWINGS:
                best, least = self._better(weights, self._narrowed(low, high, narrowing), best, least)
            for _ in range(LINES):
                best, least = self._better(weights, self._line(weights, *best), best, least)
        self.scales[..., group], self.offsets[..., group] = best

    def _narrowed(self, low: Tensor, high: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Return scale and offset of the middle share of a range."""
        margin = (high - low) * (0.5 - 0.5 * share)
        offset = self.stored(low + margin)
        return self.stored((high - margin - offset).clamp(min=0) / self.levels), offset

    def _line(self, weights: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and offset of the least-squares line through the codes for `scale` and `offset`."""
        codes = self._round(weights, scale[..., None], offset[..., None])[0]
        code, weight = codes.mean(-1, keepdim=True), weights.mean(-1, keepdim=True)
        spread = (codes - code).square().sum(-1)
        slope = ((codes - code) * (weights - weight)).sum(-1) / spread.clamp(min=torch.finfo(torch.float32).tiny)
        slope = self.stored(torch.where(spread > 0, slope, scale).clamp(min=0))
        return slope, self.stored(weight[..., 0] - slope * code[..., 0])

    def _better(
        self, weights: Tensor, tried: tuple[Tensor, Tensor], best: tuple[Tensor, Tensor], least: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return, row by row, the parameters with the smaller error, and that error."""
        error = self._error(weights, *tried)
        better = error < least
        scale, offset = (torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
        return (scale, offset), torch.minimum(error, least)

    def _error(self, weights: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return self._round(weights, scale[..., None], offset[..., None])[1].sub_(weights).square_().sum(-1)

    def stored(self, parameters: Tensor) -> Tensor:
        """Round parameters to their stored dtype."""
        return stored(parameters, self.storage)

    def values(self, codes: Tensor) -> Tensor:
        """Return the float32 values of codes [E, R, C]."""
        group = torch.arange(codes.shape[-1], device=codes.device) // self.width
        return self.scales[..., group] * codes + self.offsets[..., group]

    def _round(self, values: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = ((values - offset) / divisor).round_().clamp_(0, self.levels)
        return codes, codes * scale + offset

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Round half to even and clamp to the code range."""
        experts = torch.arange(values.shape[0], device=values.device)
        scale, offset = self.scales[experts, :, columns // self.width], self.offsets[experts, :, columns // self.width]
        codes, rounded = self._round(values, scale, offset)
        return codes.to(torch.uint8), rounded


class SymmetricGrid:
    """Groups of columns with a scale: values are `scale * (code - 2^(bits - 1))`, scales of either sign.

    The scale of a group is that of `moepack.solvers.groupwise.quantize_groupwise`. Codes are uint8; `scales` is [E, R,
    G].

    Args:
        bits: 2, 3, 4 or 8.
        group: columns per group: 16, 32, 64, 128 or 256.
        static: fit every group to the original weights (required by act-order).
        search: choose scales of least squared error; otherwise from the largest magnitude.
    """

    def __init__(self, bits: int, group: int, *, static: bool = False, search: bool = True) -> None:
        self.bits, self.group, self.search = bits, group, search
        self.half = 2 ** (bits - 1)
        self.group_size = None if static else group
        self.scales = torch.empty(0)

    def fit(self, weights: Tensor) -> None:
        """Allocate the scales and fit every group (dynamic groups are fitted again on entry)."""
        self.scales = quantize_groupwise(weights, self.bits, self.group, search=self.search).scales

    def enter(self, start: int, weights: Tensor) -> None:
        """Refit the group that starts at ``start`` to its compensated weights."""
        found = quantize_groupwise(weights, self.bits, self.group, search=self.search)
        self.scales[..., start // self.group] = found.scales[..., 0]

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Round half to even and clamp to the code range."""
        experts = torch.arange(values.shape[0], device=values.device)
        scale = self.scales[experts, :, columns // self.group]
        steps = (values / torch.where(scale != 0, scale, torch.inf)).round_().clamp_(-self.half, self.half - 1)
        return (steps + self.half).to(torch.uint8), steps * scale


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the stored dtype, saturating at its largest finite value."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype).to(values.dtype)
