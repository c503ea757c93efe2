"""Integers in groups of columns that minimize the output error of a layer on a text.

The output error of a row is (w - q) H (w - q)^T, with the Hessian H of the layer's inputs. It is reduced in steps, none
of which but the first can increase it:

1. The scale (and offset) of each group is that of `quantize_groupwise`, and GPTQ rounds the columns to this grid, those
   with the largest diagonal of H first (`moepack.solvers.gptq`).
2. The scale (and offset) of one group after another is replaced by the best one for the codes, in closed form.
3. One code after another is replaced by the best one given all others (`descend`).

Steps 2 and 3 alternate. They reduce the error of GPTQ by 5 to 10 %, and GPTQ that of rounding by 25 to 70 %.

Invariants: as for :mod:`moepack.solvers.gptq`. Scales and offsets are rounded as stored before they are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moepack.solvers.gptq import SUB_BLOCK, ExpertReport, GptqSettings, Rounder, damped, gptq, round_columns
from moepack.solvers.grids import stored
from moepack.solvers.groupwise import quantize_groupwise
from moepack.solvers.refit import best_parameters

__all__ = ["IN_TORCH", "Groups", "IntegerSettings", "Loops", "SolvedIntegers", "descend", "solve_integers"]

BLOCK = 128
"""Columns whose changes are spread to later columns together."""


@dataclass(frozen=True)
class IntegerSettings:
    """Settings of the solver.

    Attributes:
        bits: 2, 3, 4 or 8.
        group: columns that share a scale: 16, 32, 64, 128 or 256; None for the whole row.
        symmetric: one scale per group; otherwise a scale and an offset.
        damping: damping of the Hessians, relative to their mean diagonal. With less, codes follow the text's
            covariance too closely: on another kind of text, 0.1 has a twentieth more error than 0.5.
        sweeps: number of alternations of steps 2 and 3.
    """

    bits: int
    group: int | None = 64
    symmetric: bool = True
    damping: float = 0.5
    sweeps: int = 3


@dataclass
class Groups:
    """A grid: `scale * (code - middle) + offset`, where `middle` is 2^(bits - 1) without offsets, otherwise 0.

    It is a `moepack.solvers.grids.Grid` whose parameters are given.

    Attributes:
        bits: bits per code.
        width: columns per group.
        scales: [E, R, G] float32, contiguous.
        offsets: the same; None if symmetric.
        group_size: None: the solver does not fit groups.
    """

    bits: int
    width: int
    scales: Tensor
    offsets: Tensor | None = None
    group_size: int | None = field(default=None, init=False)

    @classmethod
    def of(cls, weights: Tensor, settings: IntegerSettings) -> Groups:
        """Return the grid of least squared error of the weights [E, R, C].

        Raises:
            InvalidTensorError: a weight is NaN or infinite, or a parameter is out of range of float16.
        """
        found = quantize_groupwise(weights, settings.bits, settings.group, symmetric=settings.symmetric)
        offsets = None if found.offsets is None else found.offsets.contiguous()
        return cls(settings.bits, settings.group or max(weights.shape[-1], 1), found.scales.contiguous(), offsets)

    @property
    def middle(self) -> int:
        """The code of the value `offset`."""
        return 2 ** (self.bits - 1) if self.offsets is None else 0

    def fit(self, weights: Tensor) -> None:
        """Do nothing: the parameters are given."""

    def enter(self, start: int, weights: Tensor) -> None:
        """Do nothing: the parameters are given."""

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Round half to even and clamp to the code range."""
        experts, groups = torch.arange(len(values), device=values.device), columns // self.width
        offset = None if self.offsets is None else self.offsets[experts, :, groups]
        codes, rounded = self.nearest(values, self.scales[experts, :, groups], offset)
        return codes.to(torch.uint8), rounded

    def nearest(self, values: Tensor, scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the nearest codes, float32, and their values, for the parameters of each value."""
        shifted = values if offset is None else values - offset
        steps = (shifted / torch.where(scale != 0, scale, torch.inf)).round_()
        steps = steps.clamp_(-self.middle, 2**self.bits - 1 - self.middle)
        return steps + self.middle, steps * scale if offset is None else steps * scale + offset

    def values(self, codes: Tensor) -> Tensor:
        """Return the values [E, R, C] of codes."""
        places = torch.arange(codes.shape[-1], device=codes.device) // self.width
        found = self.scales[..., places] * (codes - float(self.middle))
        return found if self.offsets is None else found + self.offsets[..., places]

    def scaled(self, factors: Tensor) -> Groups:
        """Return a copy whose values are those of each row times a factor [E, R], up to the rounding of parameters."""
        scales = stored(self.scales * factors[..., None], torch.float16)
        offsets = None if self.offsets is None else stored(self.offsets * factors[..., None], torch.float16)
        return replace(self, scales=scales, offsets=offsets)

    def refitted(self, codes: Tensor, left: Tensor, metric: Tensor) -> Groups:
        """Return a copy with better parameters for the codes [E, R, C], and update `left`.

        Args:
            codes: the codes, float32.
            left: [E, R, C], the residual of the weights times `metric`; updated in place.
            metric: [E, C, C], damped Hessians.
        """
        scales, offsets = self.scales.clone(), None if self.offsets is None else self.offsets.clone()
        for group in range(scales.shape[-1]):
            part = slice(group * self.width, min((group + 1) * self.width, codes.shape[-1]))
            steps, own = codes[..., part] - float(self.middle), metric[:, part, part]
            scale, offset = scales[..., group], None if offsets is None else offsets[..., group]
            new, moved = best_parameters(steps, left[..., part], own, scale, offset, torch.float16)
            changed = (new - scale)[..., None] * steps
            scales[..., group] = new
            if offsets is not None and offset is not None and moved is not None:
                changed = changed + (moved - offset)[..., None]
                offsets[..., group] = moved
            left -= torch.bmm(changed, metric[:, part])
        return replace(self, scales=scales, offsets=offsets)


@dataclass(frozen=True)
class SolvedIntegers:
    """The solution.

    Attributes:
        codes: [E, R, C] uint8.
        grid: scales and offsets, exactly as a packed tensor stores them.
        values: [E, R, C] float32, the values of the codes.
        reports: the report of GPTQ for each expert.
        errors: [E], the damped output error, relative to the mean diagonal of each Hessian.
    """

    codes: Tensor
    grid: Groups
    values: Tensor
    reports: tuple[ExpertReport, ...]
    errors: Tensor


def descend(grid: Groups, start: int, codes: Tensor, gradient: Tensor, changes: Tensor, metric: Tensor) -> None:
    """Replace the codes of a block of columns, each by the best one given all others.

    With the gradient g = (w - q) H of a row, the best value of column j alone is q_j + g_j / H_jj.

    Args:
        grid: scales and offsets of all groups.
        start: the first column.
        codes: [E, K, R] float32, replaced in place.
        gradient: [E, K, R], for the codes of earlier columns. Not modified.
        changes: [E, K, R], receives the new values minus the old ones.
        metric: [E, K, K], the part of H.
    """
    for j in range(codes.shape[1]):
        group = (start + j) // grid.width
        scale, offset = grid.scales[..., group], None if grid.offsets is None else grid.offsets[..., group]
        before = (codes[:, j] - float(grid.middle)) * scale
        before = before if offset is None else before + offset
        slope = gradient[:, j]
        if j:
            slope = slope - torch.bmm(metric[:, j : j + 1, :j], changes[:, :j]).squeeze(1)
        codes[:, j], after = grid.nearest(before + slope / metric[:, j, j, None], scale, offset)
        torch.sub(after, before, out=changes[:, j])


@dataclass(frozen=True)
class Loops:
    """The loops over columns, which a device may replace.

    Attributes:
        rounder: as `moepack.solvers.gptq.round_columns`, for grids of `Groups`.
        descend: as `descend`.
    """

    rounder: Rounder
    descend: Callable[[Groups, int, Tensor, Tensor, Tensor, Tensor], None]


IN_TORCH = Loops(round_columns, descend)
"""The loops in torch, on any device."""


def solve_integers(
    weights: Tensor, hessians: Tensor, settings: IntegerSettings, loops: Loops = IN_TORCH
) -> SolvedIntegers:
    """Quantize a batch of matrices.

    Args:
        weights: [E, R, C], finite.
        hessians: [E, C, C], sums of a x^T x over the inputs x, each weighted by the effect a of an error. An expert
            whose Hessian is unusable is rounded to nearest.
        settings: see `IntegerSettings`.
        loops: the loops over columns.

    Raises:
        InvalidTensorError: a weight is NaN or infinite, or a parameter is out of range of float16.
    """
    weights = weights.float()
    grid = Groups.of(weights, settings)
    result = gptq(weights, hessians, grid, GptqSettings(settings.damping, act_order=True), rounder=loops.rounder)
    metric = damped(hessians, [report.damping for report in result.reports], [r.reason for r in result.reports])
    codes = result.codes.float()
    left = torch.bmm(weights - result.values, metric)
    for _ in range(settings.sweeps):
        grid = grid.refitted(codes, left, metric)
        _sweep(codes, left, grid, metric, loops)
    grid = grid.refitted(codes, left, metric)
    values = grid.values(codes)
    residual = weights - values
    errors = (torch.bmm(residual, metric) * residual).sum((1, 2))
    return SolvedIntegers(codes.to(torch.uint8), grid, values, result.reports, errors)


def _sweep(codes: Tensor, left: Tensor, grid: Groups, metric: Tensor, loops: Loops) -> None:
    """Replace the codes of all columns; updates `codes` and `left` [E, R, C] in place."""
    columns = codes.shape[-1]
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        own = metric[:, start:stop, start:stop]
        # Columns first, so that a column is contiguous.
        gradient = left[..., start:stop].transpose(1, 2).contiguous()
        steps = codes[..., start:stop].transpose(1, 2).contiguous()
        changes = torch.empty_like(gradient)
        for first in range(0, stop - start, SUB_BLOCK):
            last = min(first + SUB_BLOCK, stop - start)
            part = slice(first, last)
            loops.descend(grid, start + first, steps[:, part], gradient[:, part], changes[:, part], own[:, part, part])
            if last < stop - start:
                gradient[:, last:].baddbmm_(own[:, last:, part], changes[:, part], alpha=-1)
        codes[..., start:stop] = steps.transpose(1, 2)
        left -= torch.bmm(changes.transpose(1, 2), metric[:, start:stop])
