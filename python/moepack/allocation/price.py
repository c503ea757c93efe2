"""A budget for sizes that are known only after solving: one price of a bit, updated before each solution.

Matrices propose *curves*: estimates of their bits at each price of a ladder. The price is where the sum of all curves
crosses the budget. The actual bits of a matrix are recorded when it is solved. The price is then updated for the
remaining ones, with curves scaled by the estimation error; so errors do not accumulate, and stages that missed the
budget can be solved again.

Matrices that are solved independently of each other, perhaps in other processes, pay one *common* price (`share`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["PricedBudget"]


class PricedBudget:
    """The bit budget of several stages of matrices, spent in ranges."""

    def __init__(self, budget: float, ladder: Tensor, curves: Mapping[str, Tensor]) -> None:
        """Create a budget without bookings.

        Args:
            budget: total bits.
            ladder: [P] prices, float64, in a geometric sequence.
            curves: by stage [E, P] float64, bits of each matrix at each price; E is the same for all.
        """
        self.budget, self.ladder, self.curves = budget, ladder, dict(curves)
        self._spent = {stage: torch.full((len(own),), torch.nan, dtype=torch.float64) for stage, own in curves.items()}
        self._bias: dict[str, float] = {}
        self._last = 0.0
        self._common: range | None = None

    def share(self, matrices: range | None) -> None:
        """Give matrices of all stages the present price, whatever the others among them take; None ends this."""
        self._common = None
        if matrices is not None:
            self._last = self._price(matrices)
        self._common = matrices

    def price(self, stage: str, matrices: range) -> float:
        """Return the price for matrices that are about to be solved; clears their bookings."""
        self._spent[stage][matrices.start : matrices.stop] = torch.nan
        if self._common is None:
            self._last = self._price()
        return self._last

    def _price(self, matrices: range = range(0)) -> float:
        """Return the price at which the unsolved matrices, and those in `matrices`, take the rest of the budget."""
        left, curve = self.budget, torch.zeros(len(self.ladder), dtype=torch.float64)
        for name, curves in self.curves.items():
            unsolved = self._spent[name].isnan()
            unsolved[matrices.start : matrices.stop] = True
            left -= float(self._spent[name][~unsolved].sum())
            curve += curves[unsolved].sum(0) * self._bias.get(name, 1.0)
        return self._crossing(curve, left)

    def record_bits(self, stage: str, matrices: range, bits: Tensor) -> None:
        """Record the bits [G] that matrices took at the last returned price."""
        group = slice(matrices.start, matrices.stop)
        self._spent[stage][group] = bits.double().cpu()
        if self._common is not None:
            group = slice(self._common.start, self._common.stop)
        known = ~self._spent[stage][group].isnan()
        expected = self._lookup(self.curves[stage][group][known].sum(0), self._last)
        if expected > 0:
            self._bias[stage] = float(self._spent[stage][group][known].sum()) / expected

    def taken(self, matrices: range) -> dict[str, Tensor]:
        """Return the recorded bits [G] of solved matrices by stage."""
        return {name: own[matrices.start : matrices.stop].clone() for name, own in self._spent.items()}

    def take(self, matrices: range, taken: Mapping[str, Tensor]) -> None:
        """Record the bits of matrices that a copy of this budget solved at the common price (`taken`)."""
        for stage, bits in taken.items():
            self.record_bits(stage, matrices, bits)

    def expect(self, stage: str, curves: Tensor) -> None:
        """Replace the curves [E, P] of a stage by better estimates."""
        self.curves[stage] = curves

    def excess(self) -> float | None:
        """Return the relative excess over the budget; `None` while bits of a matrix are missing."""
        total = float(sum(self._spent.values(), torch.zeros((), dtype=torch.float64)).sum())
        return None if total != total or self.budget == 0 else total / self.budget - 1

    def _crossing(self, curve: Tensor, bits: float) -> float:
        """Return the price at which a falling curve has `bits`: logarithmic interpolation, clamped to the ladder."""
        curve = curve.cummin(0).values
        above = int((curve >= bits).sum())
        if above in (0, len(self.ladder)):
            return float(self.ladder[max(above - 1, 0)])
        high, low = float(curve[above - 1]), float(curve[above])
        part = (high - bits) / (high - low)
        return float(self.ladder[above - 1] * (self.ladder[above] / self.ladder[above - 1]) ** part)

    def _lookup(self, curve: Tensor, price: float) -> float:
        """Return the value of a curve at a price; linear in its logarithm."""
        octaves = torch.log2(self.ladder)
        steps = (math.log2(price) - octaves[0]) / (octaves[1] - octaves[0])
        position = steps.clamp(0, len(self.ladder) - 1)
        below = min(int(position), len(self.ladder) - 2)
        return float(torch.lerp(curve[below], curve[below + 1], position - below))
