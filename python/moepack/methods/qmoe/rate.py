"""Ternary experts at a chosen number of bits a weight: which stage gets which price, and what is stored of it."""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.allocation import PricedBudget
from moepack.calibration import Stage
from moepack.methods.qmoe.curves import RateCurves
from moepack.methods.qmoe.forms import Form
from moepack.solvers.energy import energy_factors
from moepack.solvers.gptq import ExpertReport
from moepack.solvers.rate import RateProblem, RateSettings, row_bits

__all__ = ["RateSolver"]

#: A layer within this part of its budget is done; otherwise its last stage is solved again, at most RETRIES times.
TOLERANCE, RETRIES = 0.002, 3


class RateSolver:
    """Solves the stages of one layer such that the layer takes the bits it was given."""

    def __init__(self, bits_per_weight: float, experts: int, settings: RateSettings | None = None) -> None:
        """Start a layer of `experts` experts; `bits_per_weight` counts all metadata."""
        self.settings = settings or RateSettings()
        self.curves = RateCurves(bits_per_weight, experts)
        self._budget: tuple[PricedBudget, float] | None = None

    def plan(self, stage: Stage) -> None:
        """See a stage before any is solved."""
        self.curves.add(_name(stage), stage.experts, self._problem(stage))

    def solve(self, stage: Stage, form: Form) -> tuple[Tensor, Tensor, Tensor, tuple[ExpertReport, ...]]:
        """Quantize a stage; all its projections are one problem.

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
            budget.book(name, stage.experts, row_bits(codes).sum(1))
            excess = budget.excess()
            if excess is None or abs(excess) <= TOLERANCE:
                break
        raw = form.values(codes, levels)
        levels = form.scaled(levels, energy_factors(problem.weights, raw, problem.hessians))
        return codes, levels, form.values(codes, levels), reports

    def _problem(self, stage: Stage) -> RateProblem:
        moments = stage.moments()
        return RateProblem(
            torch.cat(list(stage.weights.values()), dim=1), moments.hessians, moments.drift, self.settings
        )


def _name(stage: Stage) -> str:
    return " ".join(stage.weights)
