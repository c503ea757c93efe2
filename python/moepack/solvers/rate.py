"""Ternary rows at a given rate: GPTQ whose decisions account for code length.

An entropy coder charges exactly the bits used, so a ternary row may be dense or sparse, and the solver decides which
weights are non-zero. Every weight gets the code that minimizes

    p_j^2 (w - v)^2 + price * bits(code),

the increase of the damped output error (the error that GPTQ distributes over the remaining columns) plus a price for
the code's length under the row's own frequencies. With one price for a whole layer, the marginal gain of a bit is the
same in every row, projection and expert: experts that many tokens use become dense, unused ones empty.

Levels follow the density: a row with density d gets the levels +-gain * rms / sqrt(d). With gain 1 the row keeps its
energy: *scale compensates for zeroed weights*. Least-squares levels (the centroids) would lose output energy. With a
gain above 1, levels save more of the rate and the price, which adapts to the calibration text, saves less: measured, it
costs little on that text's domain and helps on another. Levels and frequencies depend on the codes and are found by
repeating the pass.

Invariants: as for :mod:`moepack.solvers.gptq`; a row depends only on its weights, its expert's Hessian and its price,
so prices may be tried on some rows and used for the others.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.gptq import ExpertReport, GptqSettings, gptq
from moepack.solvers.problem import Problem

__all__ = ["RateGrid", "RateProblem", "RateSettings", "row_bits"]

#: Bits of a row's level (16: the two are opposite), length (12) and dictionary (4), and its share of the group starts
#: (64 bits for 64 rows).
ROW_METADATA = 33
#: Half a byte for the rounded length of a non-empty row, and its last code, which represents zeros beyond its end.
ROW_TAIL = 5
#: Size of FSV8 relative to the entropy of a row, with a choice among eight dictionaries.
CODE_EXCESS = 1.007


@dataclass(frozen=True)
class RateSettings:
    """Settings of the solver.

    Attributes:
        damping: damping of the Hessians, relative to their mean diagonal. Far above GPTQ's, because codes that follow
            the calibration set's covariance too closely do not generalize to other text.
        shift: share of the accumulated error of earlier layers that is corrected by moving the weights, 0 to 1.
        shift_damping: damping of that regression.
        passes: number of passes over each matrix; each refits levels and code lengths to the last codes.
        narrowest, widest: bounds of a level in units of the row's root mean square. Above 3 a row empties itself: the
            fewer codes, the larger the level, the fewer codes.
    """

    damping: float = 1.0
    shift: float = 0.5
    shift_damping: float = 0.2
    passes: int = 4
    narrowest: float = 1.3
    widest: float = 3.0

    def __post_init__(self) -> None:
        if self.passes < 1 or not 0 <= self.shift <= 1 or not 0 < self.narrowest <= self.widest:
            raise ValueError(f"invalid settings: {self}")


class RateGrid:
    """Ternary rows with given levels; a code is chosen by error and length.

    Attributes:
        levels: [E, R, 2], (negative, positive).
    """

    group_size: int | None = None

    def __init__(self, levels: Tensor, prices: Tensor, lengths: Tensor) -> None:
        """Create the grid.

        Args:
            levels: [E, R, 2], (negative, positive).
            prices: [E, R], squared error per bit (in the units of the curvature).
            lengths: [E, R, 3], bits of the codes -1, 0, 1.
        """
        self.levels = levels
        self._low, self._high = (level.contiguous() for level in levels.unbind(-1))
        self._penalties = (lengths * prices[..., None]).unbind(-1)

    def fit(self, weights: Tensor) -> None:
        """Do nothing: the levels are given."""

    def enter(self, start: int, weights: Tensor) -> None:
        """Do nothing: there are no groups."""

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the cheapest code; ties go to zero."""
        scale = 1 / curvature[:, None]
        costs = [
            (values - level).square_() if level is not None else values.square()
            for level in (self._low, None, self._high)
        ]
        below, zero, above = (
            cost.addcmul_(penalty, scale) for cost, penalty in zip(costs, self._penalties, strict=True)
        )
        negative = (below < zero) & (below <= above)
        positive = (above < zero) & ~negative
        value = torch.where(positive, self._high, torch.where(negative, self._low, values.new_zeros(())))
        return positive.to(torch.int8) - negative.to(torch.int8), value


def row_bits(codes: Tensor) -> Tensor:
    """Estimate the FSV8 size of each row of codes [..., C] in bits, including all metadata; [...] float64."""
    columns = codes.shape[-1]
    counts = torch.stack([(codes == code).sum(-1) for code in (-1, 0, 1)], -1).double()
    entropy = -(torch.xlogy(counts, counts / max(columns, 1)) / math.log(2)).sum(-1)
    used = (counts[..., 0] + counts[..., 2] > 0).double()
    return entropy * CODE_EXCESS + ROW_TAIL * used + ROW_METADATA


class RateProblem(Problem):
    """A batch of matrices to quantize to ternary values at different prices."""

    def __init__(
        self, weights: Tensor, hessians: Tensor, drift: Tensor | None = None, settings: RateSettings | None = None
    ) -> None:
        """Factorize the Hessians and move the weights; arguments as for `Problem`."""
        self.settings = settings or RateSettings()
        super().__init__(weights, hessians, drift, self.settings)

    def rows(self, picked: Tensor) -> RateProblem:
        """Return the problem restricted to the rows `picked` [K] int64; rows may repeat."""
        part = copy(self)
        part.weights = self.weights[:, picked]
        return part

    def solve(self, prices: Tensor, gains: Tensor) -> tuple[Tensor, Tensor, tuple[ExpertReport, ...]]:
        """Quantize all rows.

        Args:
            prices: output error per bit, [R].
            gains: factors of the levels over energy preservation, [R].

        Returns:
            codes [E, R, C] int8, levels [E, R, 2] float32 before they are rounded for storage, reports of the experts.
        """
        rms = self.weights.square().mean(-1).sqrt()
        relative = prices[None, :].to(rms) / self.importance[:, None]
        # Initial guess: the density at which the levels preserve the energy of Gaussian rows rounded to nearest.
        density = torch.full_like(rms, 1 / 3)
        lengths = _lengths(density / 2, 1 - density, density / 2)
        gptq_settings = GptqSettings(damping=self.settings.damping)
        for _ in range(self.settings.passes):
            size = (gains.to(rms) * density.rsqrt()).clamp(self.settings.narrowest, self.settings.widest) * rms
            grid = RateGrid(torch.stack([-size, size], -1), relative, lengths)
            result = gptq(self.weights, self.hessians, grid, gptq_settings, factors=self.factors)
            negative, positive = ((result.codes == sign).float().mean(-1) for sign in (-1, 1))
            density = (negative + positive).clamp(min=1 / max(self.weights.shape[-1], 1))
            lengths = _lengths(negative, 1 - negative - positive, positive, self.weights.shape[-1])
        return result.codes, grid.levels, result.reports


def _lengths(negative: Tensor, zero: Tensor, positive: Tensor, columns: int = 0) -> Tensor:
    """Return bits [E, R, 3] of the codes of rows with these frequencies; half a code is added to each count."""
    frequencies = torch.stack([negative, zero, positive], -1)
    if columns:
        frequencies = (frequencies * columns + 0.5) / (columns + 1.5)
    return -torch.log2(frequencies)
