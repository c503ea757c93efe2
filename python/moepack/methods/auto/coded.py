"""All tensors of a model as coded integers, at one price of a bit, within the bits of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor

from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.auto.importance import Importance
from moepack.methods.auto.packer import Packer
from moepack.methods.base import Expected, PackedTensor, Solution, Weights
from moepack.methods.rate import Rate
from moepack.methods.rate.layer import LayerSolver
from moepack.methods.rate.sample import Sample, take_sample
from moepack.methods.rate.step import Step
from moepack.solvers.priced import WORTH, largest_at, low_bits_of, round_priced
from moepack.solvers.uniform import UniformSettings

__all__ = ["Coded"]

CORRECTION = 1.25
"""Most that a layer's bits are changed by, either way, for what the layers before it took."""

FINEST, ROUNDS = 8.0, 3
"""Steps that the root mean square of a tensor may be, some five bits a weight, twice as many for each low bit: beyond,
integers become exceptions. How often the importance of what is finer is lowered."""

COMPENSATED = 0.35
"""What error compensation leaves of the loss that rounding alone would cost (docs/methods/auto.md)."""


@dataclass
class Coded(Packer):
    """All tensors as coded integers.

    Attributes:
        coder: the method of one price, decided.
        loss: that is expected.
        given: bits that each tensor was given, by name. taken: those of tensors that are packed.
        weights: how many each tensor has.
        rows: factors of the rows of some tensors: their steps are in proportion to one over them.
    """

    coder: Rate
    loss: float
    given: Mapping[str, float]
    weights: Mapping[str, int]
    rows: Mapping[str, Tensor]
    taken: dict[str, float] = field(default_factory=dict)

    @classmethod
    def decided(cls, coder: Rate, checkpoint: Checkpoint, model: MoeModel, importance: Importance) -> Coded:
        """Find the step that meets the bits of a coder; raises as `Rate.prepare`."""
        used, largest = dict(importance.values), largest_at(coder.bits_per_weight)
        for _ in range(ROUNDS):
            sample = take_sample(checkpoint, model, coder.dense_roles, used, importance.rows, largest)
            step = coder.decide(sample)
            if not (finer := _too_fine(sample, step)):
                break
            used |= {name: used[name] / excess**2 for name, excess in finer.items()}
        solved = {name for name in sample.rows if coder.calibration is not None and name not in importance.rows}
        errors = (
            error * importance.values[name] * sample.widths[name] ** 2 * (COMPENSATED if name in solved else 1.0)
            for name, error in _errors(sample, step)
        )
        weights = {name: math.prod(shape) for name, shape in sample.shapes.items()}
        return cls(coder, importance.loss(errors), step.bits, weights, importance.rows)

    def expected(self, weights: Weights) -> Expected:
        """The bits that a tensor was given."""
        return Expected(self.given[weights.name] / 8, exact=False)

    def decision(self, name: str) -> Any:
        """Its step, or the bits that it was given."""
        return self.coder.decided(name)

    def book(self, name: str, nbytes: int) -> None:
        """Note what a tensor took."""
        self.taken[name] = 8.0 * nbytes

    def layer_solver(self) -> LayerSolver:
        """A solver for tensors whose bits are changed by what was taken before."""
        left, due, _ = self._open()
        factor = min(max(left / due, 1 / CORRECTION), CORRECTION) if due else 1.0
        bits = {name: bits * factor for name, bits in self.given.items()}
        return LayerSolver(bits, UniformSettings(largest=largest_at(self.coder.bits_per_weight)))

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Linear layers that read the same input are solved one by one: their errors count differently."""
        if stage.inputs is None:
            for weights in stage.tensors.values():
                self._correct(weights.name)
            return self.coder.solve(replace(stage, tensors=dict(map(self._scaled, stage.tensors.items()))))
        if not stage.dense:
            found: dict[str, Solution] = stage.plan.solve(stage)
            return found
        found = {}
        known = replace(stage, inputs=replace(stage.inputs, moments=cache(stage.inputs.moments)))
        for name in stage.tensors:
            solver, part = self.layer_solver(), known.only([name])
            solver.plan(part)
            found |= solver.solve(part)
        return found

    def _open(self) -> tuple[float, float, int]:
        """Bits that are left, bits that tensors still to be packed were given, and how many weights they have."""
        still = [name for name in self.given if name not in self.taken]
        left = sum(self.given.values()) - sum(self.taken.values())
        return left, sum(self.given[name] for name in still), sum(self.weights[name] for name in still)

    def _correct(self, name: str) -> None:
        """Let a tensor take its part of what is left: a step half as large takes a bit a weight more."""
        left, due, weights = self._open()
        if weights:
            most = math.log2(CORRECTION)
            self.coder.widen(name, 2.0 ** -min(max((left - due) / weights, -most), most))

    def _scaled(self, named: tuple[str, Weights]) -> tuple[str, Weights]:
        """A tensor whose rows are multiplied by their factors, if they have any."""
        name, weights = named
        rows = self.rows.get(weights.name)
        if rows is None:
            return named
        return name, replace(weights, expert=lambda expert: weights.expert(expert) * rows[:, None])

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Code the integers."""
        if weights.name in self.rows:
            steps = solution.parts["step"] / self.rows[weights.name]
            solution = replace(solution, parts={**solution.parts, "step": steps.bfloat16().float()})
        return self.coder.pack(weights, solution)


def _too_fine(sample: Sample, step: Step) -> dict[str, float]:
    """Tensors whose steps are too fine for tables of 64 integers and low bits beside them, and how many times."""
    finest = FINEST * 2 ** low_bits_of(sample.profile.largest)
    spreads = {name: float(sample.values(name).square().mean()) ** 0.5 / step.size for name in sample.rows}
    return {name: spread / finest for name, spread in spreads.items() if spread > 1.02 * finest}


def _errors(sample: Sample, step: Step) -> Iterator[tuple[str, float]]:
    """The sum of squared errors of each tensor, times its importance."""
    for name in sample.rows:
        values, factor = sample.values(name), sample.factor(name)
        rounded = round_priced(values, step.size, step.lengths, WORTH) * step.size
        yield name, float((rounded - values).square().sum()) * factor
