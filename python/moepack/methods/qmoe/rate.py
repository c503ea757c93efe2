"""Ternary experts at a given number of bits per weight: chooses the price of a bit for each stage.

Before any stage is solved, the size of a layer at each price of a bit is measured on a few rows of every matrix. Rows
are independent, so the same row at another price is solved as another row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from moepack.allocation import Curves, PricedBudget
from moepack.allocation.importance import evenness
from moepack.calibration import Stage
from moepack.methods.qmoe.forms import Form
from moepack.solvers.energy import energy_factors
from moepack.solvers.gptq import ExpertReport
from moepack.solvers.rate import RateProblem, RateSettings, row_bits

__all__ = ["RateCurves", "RateSolver"]

#: A layer within this fraction of its budget is done; otherwise its last stage is solved again, at most RETRIES times.
TOLERANCE, RETRIES = 0.002, 3
#: Prices tried, relative to the layer's unit: the output error per weight of a typical matrix set to zero.
STEPS = 2.0 ** torch.arange(-18, 6, dtype=torch.float64)
#: Level gains tried. The first gain that can spend the whole budget is used, starting from the first or the last one.
GAINS = (1.2, 1.1, 1.0)
#: A layer uses its experts evenly if the exponential of the entropy of their importance is at least the first fraction
#: of their number. It is sparse below the second number of bits per weight. Among uneven experts, a price moves bits
#: to those that are used, which generalizes to any text, so a layer with bits to move gets gain 1 (measured at 1.25
#: bits: a loss increase of 0.34 of the scaled grid's instead of 0.63). Among even experts, a price only follows the
#: calibration text, and large levels generalize better.
EVEN, SPARSE = 0.75, 1.15
#: Rows sampled per matrix.
ROWS = 16


class Measured(NamedTuple):
    """Size curves of a group of experts in a stage.

    Attributes:
        stage: name of the stage.
        experts: the experts.
        weights: number of weights of a matrix.
        unit: unit of the prices.
        curves: [G, gains, prices] float64, bits.
        importance: [G] float64.
    """

    stage: str
    experts: range
    weights: int
    unit: float
    curves: Tensor
    importance: Tensor


class RateCurves:
    """Size curves of one layer for all gains.

    Prices are relative to `unit`, which the first measurement that is added sets.
    """

    def __init__(self, bits_per_weight: float, experts: int) -> None:
        """Create curves for an empty layer; `bits_per_weight` includes all metadata."""
        self.bits_per_weight, self.experts = bits_per_weight, experts
        self.unit = 0.0
        self._weights: dict[str, int] = {}
        self._curves: dict[str, Tensor] = {}
        self._importance: dict[str, Tensor] = {}

    def add(self, stage: str, experts: range, problem: RateProblem) -> None:
        """Measure the experts' matrices of `stage`, and add the measurement."""
        self.put(self.measure(stage, experts, problem))

    def measure(self, stage: str, experts: range, problem: RateProblem) -> Measured:
        """Solve sampled rows of the experts' matrices of `stage` at all prices and gains."""
        _, rows, columns = problem.weights.shape
        energy = problem.importance * problem.weights.square().mean((1, 2))
        unit = self.unit or max(float(energy.mean()), torch.finfo(torch.float32).tiny)
        picked = torch.linspace(0, rows - 1, min(ROWS, rows), dtype=torch.float64).round().long()
        tried = len(GAINS) * len(STEPS)
        device = problem.weights.device
        prices = (STEPS * unit).float().repeat(len(GAINS)).repeat_interleave(len(picked)).to(device)
        gains = torch.tensor(GAINS).repeat_interleave(len(STEPS) * len(picked)).to(device)
        codes, _, _ = problem.rows(picked.repeat(tried).to(device)).solve(prices, gains)
        bits = row_bits(codes).view(len(experts), tried, len(picked)).sum(2) * (rows / len(picked))
        curves = bits.view(len(experts), len(GAINS), len(STEPS)).cpu()
        return Measured(stage, experts, rows * columns, unit, curves, problem.importance.double().cpu())

    def put(self, measured: Measured) -> None:
        """Add a measurement. The first one decides the unit of those that are made afterwards."""
        self.unit = self.unit or measured.unit
        stage, group = measured.stage, slice(measured.experts.start, measured.experts.stop)
        curves = self._curves.setdefault(stage, torch.zeros(self.experts, len(GAINS), len(STEPS), dtype=torch.float64))
        curves[group] = measured.curves
        importance = self._importance.setdefault(stage, torch.zeros(self.experts, dtype=torch.float64))
        importance[group] = measured.importance
        self._weights[stage] = self.experts * measured.weights

    def budget(self) -> tuple[PricedBudget, float]:
        """Return the budget of the layer, with prices relative to `unit`, and the gain of its levels."""
        wanted = self.bits_per_weight * sum(self._weights.values())
        gain = self._gain(wanted)
        curves = {name: Curves.of(own[:, gain]) for name, own in self._curves.items()}
        return PricedBudget(wanted, STEPS, curves), GAINS[gain]

    def _gain(self, wanted: float) -> int:
        shares = [evenness(importance) for importance in self._importance.values()]
        first = 0 if sum(shares) >= EVEN * len(shares) or self.bits_per_weight < SPARSE else len(GAINS) - 1
        most = sum((curves.sum(0)[:, 0] for curves in self._curves.values()), torch.zeros((), dtype=torch.float64))
        return next((gain for gain in range(first, len(GAINS)) if float(most[gain]) >= wanted), len(GAINS) - 1)


class RateSolver:
    """Solves the stages of one layer so that the layer meets its bit budget."""

    def __init__(self, bits_per_weight: float, experts: int, settings: RateSettings | None = None) -> None:
        """Start a layer of `experts` experts; `bits_per_weight` includes all metadata."""
        self.settings = settings or RateSettings()
        self.curves = RateCurves(bits_per_weight, experts)
        self._budget: tuple[PricedBudget, float] | None = None

    def measure(self, stage: Stage) -> Measured:
        """Measure the size of a stage at all prices before any is solved."""
        return self.curves.measure(_name(stage), stage.experts, self._problem(stage))

    def add(self, measured: Measured) -> None:
        """Add a measurement."""
        self.curves.put(measured)

    def begin(self, wave: Sequence[range]) -> None:
        """Fix the price of a wave of several groups; that of a single group is updated while it is solved."""
        self._budget = self._budget or self.curves.budget()
        self._budget[0].share(range(wave[0].start, wave[-1].stop) if len(wave) > 1 else None)

    def apart(self, names: Collection[str]) -> RateSolver:
        """Return a copy."""
        return copy(self)

    def taken(self, group: range) -> dict[str, Tensor]:
        """Return the bits of a solved group."""
        assert self._budget is not None
        return self._budget[0].taken(group)

    def take(self, group: range, taken: Mapping[str, Tensor]) -> None:
        """Record the bits of a group that a copy solved."""
        assert self._budget is not None
        self._budget[0].take(group, taken)

    def solve(self, stage: Stage, form: Form) -> tuple[Tensor, Tensor, Tensor, tuple[ExpertReport, ...]]:
        """Quantize a stage; all its projections form one problem.

        Returns:
            codes [G, R, C], levels [G, R, 2] as `form` stores them, values [G, R, C], reports of the experts.
        """
        problem, name = self._problem(stage), _name(stage)
        self._budget = self._budget or self.curves.budget()
        budget, gain = self._budget
        for _ in range(RETRIES):
            price = self.curves.unit * budget.price(name, stage.experts)
            every = torch.ones(problem.weights.shape[1], device=problem.weights.device)
            codes, levels, reports = problem.solve(price * every, gain * every)
            budget.record_bits(name, stage.experts, row_bits(codes).sum(1))
            excess = budget.excess()
            if excess is None or abs(excess) <= TOLERANCE:
                break
        raw = form.values(codes, levels)
        levels = form.scaled(levels, energy_factors(problem.weights, raw, problem.hessians))
        return codes, levels, form.values(codes, levels), reports

    def _problem(self, stage: Stage) -> RateProblem:
        moments = stage.moments()
        weights = torch.cat(list(stage.weights.values()), dim=1)
        return RateProblem(weights, moments.hessians, moments.drift, self.settings)


def _name(stage: Stage) -> str:
    return " ".join(stage.weights)
