"""The price of a bit in a layer, such that the layer takes the bits it was given.

Bits fall as their price rises, but by how much is only known by solving. Before a layer is solved, a few rows of every
matrix are solved at a ladder of prices, all at once: rows are independent, so the same row at another price is just
another row. The sums over a layer make a curve of bits over prices, on which the price is looked up. What the matrices
really took is booked as they are solved, and the price is looked up again for those that remain on curves scaled by
what the estimate was wrong by; so errors do not add up, and a layer that missed its budget can be tried again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.solvers.rate import RateProblem, row_bits

__all__ = ["RateBudget"]

#: Prices tried, relative to the layer's unit: the output error of a typical matrix if all of it were zero, per weight.
STEPS = 2.0 ** torch.arange(-18, 6, dtype=torch.float64)
#: Level gains tried; the first that can spend the whole budget is used, from the first or the last on.
GAINS = (1.2, 1.1, 1.0)
#: A layer uses its experts evenly if the exponential of the entropy of their importance is this part of their number,
#: and is sparse below these bits a weight. Among uneven experts a price moves bits to those that are used, which holds
#: for any text, so a layer with bits to move gets the gain 1 (measured at 1.25 bits: a loss increase of 0.34 of the
#: scaled grid's instead of 0.63). Among even ones it only follows the calibration text: large levels carry over better.
EVEN, SPARSE = 0.75, 1.15
#: Rows of a matrix that are tried.
ROWS = 16


class RateBudget:
    """Bits of one layer. Add all problems, then look prices up and book what was spent."""

    def __init__(self, bits_per_weight: float, experts: int) -> None:
        """Start with an empty layer; `bits_per_weight` counts all metadata."""
        self.bits_per_weight, self.experts = bits_per_weight, experts
        self.unit: float | None = None
        self._weights: dict[str, int] = {}
        self._curves: dict[str, Tensor] = {}
        self._spent: dict[str, Tensor] = {}
        self._bias: dict[str, float] = {}
        self._importance: dict[str, Tensor] = {}
        self._last = (0.0, 0)

    def add(self, stage: str, experts: range, problem: RateProblem) -> None:
        """Solve some rows of the experts' matrices of `stage` at all prices and gains."""
        _, rows, columns = problem.weights.shape
        if self.unit is None:
            energy = problem.importance * problem.weights.square().mean((1, 2))
            self.unit = max(float(energy.mean()), torch.finfo(torch.float32).tiny)
        picked = torch.linspace(0, rows - 1, min(ROWS, rows), dtype=torch.float64).round().long()
        tried = len(GAINS) * len(STEPS)
        device = problem.weights.device
        prices = (STEPS * self.unit).float().repeat(len(GAINS)).repeat_interleave(len(picked)).to(device)
        gains = torch.tensor(GAINS).repeat_interleave(len(STEPS) * len(picked)).to(device)
        codes, _, _ = problem.rows(picked.repeat(tried).to(device)).solve(prices, gains)
        bits = row_bits(codes).view(len(experts), tried, len(picked)).sum(2) * (rows / len(picked))
        curves = self._curves.setdefault(stage, torch.zeros(self.experts, len(GAINS), len(STEPS), dtype=torch.float64))
        curves[experts.start : experts.stop] = bits.view(len(experts), len(GAINS), len(STEPS)).cpu()
        importance = self._importance.setdefault(stage, torch.zeros(self.experts, dtype=torch.float64))
        importance[experts.start : experts.stop] = problem.importance.double().cpu()
        self._weights[stage] = self.experts * rows * columns
        self._spent.setdefault(stage, torch.full((self.experts,), float("nan"), dtype=torch.float64))

    def price(self, stage: str, experts: range) -> tuple[float, float]:
        """The price of a bit for a stage about to be solved, and the gain of the levels; forgets if it was booked."""
        assert self.unit is not None
        self._spent[stage][experts.start : experts.stop] = float("nan")
        gain = self._gain()
        left = self.bits_per_weight * sum(self._weights.values())
        curve = torch.zeros(len(STEPS), dtype=torch.float64)
        for name, curves in self._curves.items():
            open_ = self._spent[name].isnan()
            left -= float(self._spent[name][~open_].sum())
            curve += curves[open_, gain].sum(0) * self._bias.get(name, 1.0)
        step = _crossing(curve, left)
        self._last = (step, gain)
        return self.unit * step, GAINS[gain]

    def book(self, stage: str, experts: range, bits: Tensor) -> None:
        """Note the bits [G] that the experts' matrices took at the last price that was asked for."""
        group = slice(experts.start, experts.stop)
        self._spent[stage][group] = bits.double().cpu()
        step, gain = self._last
        expected = _lookup(self._curves[stage][group, gain].sum(0), step)
        if expected > 0:
            self._bias[stage] = float(self._spent[stage][group].sum()) / expected

    def excess(self) -> float | None:
        """What the finished layer took over its budget, as a part of it; `None` while something is not booked."""
        spent = sum(self._spent.values())
        wanted = self.bits_per_weight * sum(self._weights.values())
        total = float(spent.sum()) if isinstance(spent, Tensor) else 0.0
        return None if total != total or wanted == 0 else total / wanted - 1

    def _gain(self) -> int:
        total = sum(curves.sum(0)[:, 0] for curves in self._curves.values())
        wanted = self.bits_per_weight * sum(self._weights.values())
        first = 0 if self._even() or self.bits_per_weight < SPARSE else len(GAINS) - 1
        fits = [i for i in range(first, len(GAINS)) if float(total[i]) >= wanted]  # type: ignore[index]
        return fits[0] if fits else len(GAINS) - 1

    def _even(self) -> bool:
        """Whether all experts matter about as much, by the mean over stages."""
        shares = []
        for importance in self._importance.values():
            part = importance / importance.sum().clamp(min=torch.finfo(torch.float64).tiny)
            shares.append(float(torch.exp(-torch.xlogy(part, part).sum())) / max(self.experts, 1))
        return sum(shares) >= EVEN * len(shares)


def _crossing(curve: Tensor, bits: float) -> float:
    """The relative price at which a falling curve over STEPS has `bits`; logarithmic between steps."""
    curve = curve.cummin(0).values
    above = int((curve >= bits).sum())
    if above == 0:
        return float(STEPS[0])
    if above == len(STEPS):
        return float(STEPS[-1])
    high, low = float(curve[above - 1]), float(curve[above])
    part = (high - bits) / (high - low)
    return float(STEPS[above - 1] * (STEPS[above] / STEPS[above - 1]) ** part)


def _lookup(curve: Tensor, step: float) -> float:
    """The value of a curve over STEPS at a relative price; linear in its logarithm."""
    position = (torch.log2(torch.tensor(step, dtype=torch.float64)) - torch.log2(STEPS[0])).clamp(0, len(STEPS) - 1)
    below = min(int(position), len(STEPS) - 2)
    return float(torch.lerp(curve[below], curve[below + 1], position - below))
