"""A budget for sizes that are known only after solving: one price of a bit, updated before each solution.

Matrices propose *curves*: estimates of their bits at each price of a ladder, computed when they are first needed, which
is near the final price. The price is where the sum of all curves crosses the budget. The actual bits of a matrix are
recorded when it is solved. The price is then updated for the remaining ones, with curves scaled by the estimation
error; so errors do not accumulate, and stages that missed the budget can be solved again.

Matrices that are solved independently of each other, perhaps in other processes, pay one *common* price (`share`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["Curves", "PricedBudget"]


class Curves:
    """Estimated bits of the matrices of a stage by price."""

    def __init__(self, count: int, compute: Callable[[int], Tensor]) -> None:
        """Create curves whose values are not yet computed.

        Args:
            count: number of matrices, E.
            compute: returns the bits [E] at the price of the given number.
        """
        self.count, self._compute = count, compute
        self._known: dict[int, Tensor] = {}

    @classmethod
    def of(cls, bits: Tensor) -> Curves:
        """Return known curves [E, P]."""
        return cls(len(bits), list(bits.double().T).__getitem__)

    def at(self, number: int) -> Tensor:
        """Return the bits at the price of a number, [E] float64."""
        if number not in self._known:
            self._known[number] = self._compute(number).double().cpu()
        return self._known[number]


class PricedBudget:
    """The bit budget of several stages of matrices, spent in ranges."""

    def __init__(self, budget: float, ladder: Tensor, curves: Mapping[str, Curves]) -> None:
        """Create a budget without bookings.

        Args:
            budget: total bits.
            ladder: [P] prices, float64, in a geometric sequence.
            curves: by stage, of the same number of matrices E. They fall with the price.
        """
        self.budget, self.ladder, self.curves = budget, ladder, dict(curves)
        self._spent = {stage: torch.full((own.count,), torch.nan, dtype=torch.float64) for stage, own in curves.items()}
        self._bias: dict[str, float] = {}
        self._last = 0.0
        self._common: range | None = None
        self._near = len(ladder) // 2

    def share(self, matrices: range | None) -> None:
        """Give matrices of all stages the present price, whatever the others among them take; None ends this."""
        self._common = None
        if matrices is not None:
            self._last = self._price(matrices)
        self._common = matrices

    @property
    def is_shared(self) -> bool:
        """Whether the price does not depend on the bits that matrices take now."""
        return self._common is not None

    def price(self, stage: str, matrices: range) -> float:
        """Return the price for matrices that are about to be solved; clears their bookings."""
        self._spent[stage][matrices.start : matrices.stop] = torch.nan
        if self._common is None:
            self._last = self._price()
        return self._last

    def _price(self, matrices: range = range(0)) -> float:
        """Return the price at which the unsolved matrices, and those in `matrices`, take the rest of the budget."""
        left, unsolved = self.budget, {name: own.isnan() for name, own in self._spent.items()}
        for name, own in unsolved.items():
            own[matrices.start : matrices.stop] = True
            left -= float(self._spent[name][~own].sum())

        def bits(number: int) -> float:
            found = ((self.curves[name].at(number)[own].sum(), name) for name, own in unsolved.items())
            return sum(float(bits) * self._bias.get(name, 1.0) for bits, name in found)

        return self._crossing(bits, left)

    def record_bits(self, stage: str, matrices: range, bits: Tensor) -> None:
        """Record the bits [G] that matrices took at the last returned price."""
        group = slice(matrices.start, matrices.stop)
        self._spent[stage][group] = bits.double().cpu()
        if self._common is not None:
            group = slice(self._common.start, self._common.stop)
        known = ~self._spent[stage][group].isnan()
        curves = self.curves[stage]
        expected = self._lookup(lambda number: float(curves.at(number)[group][known].sum()), self._last)
        if expected > 0:
            self._bias[stage] = float(self._spent[stage][group][known].sum()) / expected

    def taken(self, matrices: range) -> dict[str, Tensor]:
        """Return the recorded bits [G] of solved matrices by stage."""
        return {name: own[matrices.start : matrices.stop].clone() for name, own in self._spent.items()}

    def take(self, matrices: range, taken: Mapping[str, Tensor]) -> None:
        """Record the bits of matrices that a copy of this budget solved at the common price (`taken`)."""
        for stage, bits in taken.items():
            self.record_bits(stage, matrices, bits)

    def expect(self, stage: str, curves: Curves) -> None:
        """Replace the curves of a stage by better estimates."""
        self.curves[stage] = curves

    def excess(self) -> float | None:
        """Return the relative excess over the budget; `None` while bits of a matrix are missing."""
        total = float(sum(self._spent.values(), torch.zeros((), dtype=torch.float64)).sum())
        return None if total != total or self.budget == 0 else total / self.budget - 1

    def _crossing(self, curve: Callable[[int], float], bits: float) -> float:
        """Return the price at which a falling curve has `bits`: logarithmic interpolation, clamped to the ladder.

        The search for the first price with fewer bits starts at the last one found.
        """
        first = self._near
        while first < len(self.ladder) and curve(first) >= bits:
            first += 1
        while first > 0 and curve(first - 1) < bits:
            first -= 1
        self._near = first
        if first in (0, len(self.ladder)):
            return float(self.ladder[max(first - 1, 0)])
        high, low = curve(first - 1), curve(first)
        part = (high - bits) / (high - low)
        return float(self.ladder[first - 1] * (self.ladder[first] / self.ladder[first - 1]) ** part)

    def _lookup(self, curve: Callable[[int], float], price: float) -> float:
        """Return the value of a curve at a price; linear in its logarithm."""
        octaves = torch.log2(self.ladder)
        position = float((math.log2(price) - octaves[0]) / (octaves[1] - octaves[0]))
        position = min(max(position, 0.0), len(self.ladder) - 1.0)
        below = min(int(position), len(self.ladder) - 2)
        part = position - below
        return curve(below) * (1 - part) + curve(below + 1) * part
