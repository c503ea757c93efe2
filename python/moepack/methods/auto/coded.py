"""Packs all tensors of a model as coded integers at one price per bit, within the bit budget of the whole model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING
from moepack.methods.auto.loss import expected_rise, solved_rise
from moepack.methods.auto.packer import Allocated
from moepack.methods.base import Expected, PackedBytes, Shape, Solution, Weights
from moepack.methods.rate.coder import Coder
from moepack.methods.rate.importance import Importance, role_of
from moepack.methods.rate.layer import LayerSolver, solved_apart
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import Sample, take_sample
from moepack.methods.rate.scales import Scales
from moepack.methods.rate.settings import LEAST_BITS, MOST_BITS
from moepack.methods.rate.step_size import Step
from moepack.solvers.priced import largest_at, low_bits_of, round_priced, scale_of

__all__ = ["Coded", "coded_within"]

MARGIN, DENSE_MARGIN = 0.001, 0.003
"""Share of the packed bytes reserved without and with low bits, because the last layer may exceed its budget."""

CORRECTION = 1.25
"""Maximum factor, up or down, by which a layer's bits are corrected for the bits that earlier layers took."""

FINEST, ROUNDS = 8.0, 3
"""FINEST is the maximum root mean square of a tensor, or of a row with its own scale, in steps: about five bits per
weight. It doubles with each low bit. Beyond it, integers become exceptions. ROUNDS is the maximum number of times that
finer tensors are made coarser."""

AHEAD = 0.5
"""Bits per weight by which low bits, which GPUs do not read, start earlier than if all tensors had the same bits. The
most important tensors are the first that a table of 64 integers limits."""

CHUNK = 4096
"""Rows processed together."""


@dataclass(frozen=True)
class Coded(Allocated):
    """All tensors as coded integers.

    Attributes:
        coder: the decisions of the method `rate`.
        largest: the largest magnitude of an integer that has its own code length.
        errors, loss: see `Allocated`.
        given: bit budget of each tensor, by name.
        weights: number of weights of each tensor, by name.
        apart: bytes reserved for each tensor that other methods pack within the same size, by name.
    """

    coder: Coder
    largest: int
    errors: Mapping[str, float]
    loss: float
    given: Mapping[str, float]
    weights: Mapping[str, int]
    apart: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def within(
        cls,
        rate: Rate,
        checkpoint: Checkpoint,
        model: MoeModel,
        importance: Importance,
        room: int,
        shapes: Mapping[str, Shape],
        apart: Mapping[str, float] | None = None,
    ) -> Coded:
        """Build a packer with the step at which the tensors in `shapes` take `room` bytes; `apart` is the attribute.

        Raises:
            InvalidTensorError, ValueError: see `Rate.plan`.
        """
        rate = coded_within(rate, room, shapes)
        largest = largest_at(rate.bits_per_weight + AHEAD)
        scales, used = importance.scales, dict.fromkeys(importance.scales, 1.0)
        tokens = [linear for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head")]
        for _ in range(ROUNDS):
            sample = take_sample(checkpoint, model, rate.dense_roles, used, scales, largest, shapes)
            coder = Coder.of(rate, sample, replace(importance, scales=scales))
            step, finest = coder.step, FINEST * 2 ** low_bits_of(largest)
            widest = {name: finest * step.size * width for name, width in sample.widths.items()}
            held = {
                each.source: _held(each.matrix(), scales[each.source], widest[each.source])
                for each in tokens
                if each.source in widest
            }
            finer = _too_fine(sample, step, finest)
            if not finer.keys() - held and all(torch.equal(own, scales[name].rows) for name, own in held.items()):
                break
            used |= {name: used[name] / excess**2 for name, excess in finer.items() if name not in held}
            scales = scales | {name: scales[name].coarser(own) for name, own in held.items()}
        roles, errors = role_of(model), defaultdict[str, float](float)
        for name, error in _errors(sample, step):
            coarser = float((importance.scales[name].rows / scales[name].rows).square().mean())
            errors[roles[name]] += 0.5 * error * sample.widths[name] ** 2 * coarser
        loss = solved_rise(errors, rate.bits_per_weight) if coder.has_text else expected_rise(errors)
        weights = {name: math.prod(shape) for name, shape in sample.shapes.items()}
        return cls(coder, largest, errors, loss, step.bits, weights, apart or {})

    def expected(self, weights: Weights) -> Expected:
        """Return the budget of a tensor."""
        return Expected(self.given[weights.name] / 8, exact=False)

    @property
    def decisions(self) -> Mapping[str, Any]:
        """The step of each tensor, or its bit budget if there is a text."""
        return self.coder.decisions

    def layer_plan(self, experts: int, spent: Mapping[str, int]) -> LayerSolver | None:
        """Return the solver of a layer with a text, whose stages share its bits."""
        return self.layer_solver(spent) if self.coder.has_text else None

    def layer_solver(self, spent: Mapping[str, int]) -> LayerSolver:
        """Return a solver whose bit budgets are corrected for the bits that earlier tensors took."""
        left, due, _ = self._open(spent)
        factor = min(max(left / due, 1 / CORRECTION), CORRECTION) if due else 1.0
        bits = {name: bits * factor for name, bits in self.given.items()}
        return self.coder.layer_solver(bits, self.largest)

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Solve a stage.

        Linear layers with the same input are solved one by one, because their errors have different weights.
        """
        if stage.inputs is None:
            (weights,) = stage.tensors.values()
            return self._corrected(weights.name, stage.spent).solve(stage)
        if not stage.dense:
            found: dict[str, Solution] = stage.plan.solve(stage)
            return found
        return solved_apart(stage, lambda: self.layer_solver(stage.spent))

    def _open(self, spent: Mapping[str, int]) -> tuple[float, float, int]:
        """Return the remaining bits, and the budgeted bits and the number of weights of all tensors not yet packed."""
        still = [name for name in self.given if name not in spent]
        saved = sum(own - spent[name] for name, own in self.apart.items() if name in spent)
        left = sum(self.given.values()) + 8.0 * (saved - sum(spent[name] for name in spent.keys() & self.given.keys()))
        return left, sum(self.given[name] for name in still), sum(self.weights[name] for name in still)

    def _corrected(self, name: str, spent: Mapping[str, int]) -> Coder:
        """Adjust the step of a tensor to the remaining bits; halving a step takes one more bit per weight."""
        left, due, weights = self._open(spent)
        if not weights:
            return self.coder
        most = math.log2(CORRECTION)
        return self.coder.widened(name, 2.0 ** -min(max((left - due) / weights, -most), most))

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Encode the integers of a tensor."""
        return self.coder.pack(weights, solution)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return self.coder.notes(layers)


def coded_within(rate: Rate, room: int, shapes: Mapping[str, Shape]) -> Rate:
    """Return the method `rate` for the tensors in `shapes` that takes `room` bytes, less the reserve."""
    bits = 8 * room / max(sum(map(math.prod, shapes.values())), 1)
    bits *= 1 - (DENSE_MARGIN if low_bits_of(largest_at(bits + AHEAD)) else MARGIN)
    return replace(rate, bits_per_weight=min(max(bits, LEAST_BITS), MOST_BITS))


def _held(matrix: Tensor, scales: Scales, widest: float) -> Tensor:
    """Return row factors [1, R] at which no row of a matrix [R, C] has a root mean square above `widest`.

    Factors are at most a quarter of an octave smaller than necessary.
    """
    starts = range(0, len(matrix), CHUNK)
    squares = [(matrix[at : at + CHUNK].float() * scales.columns[0]).square().mean(1) for at in starts]
    spreads = scales.rows[0] * torch.cat(squares).sqrt()
    octaves = torch.log2(spreads / widest).mul(4).ceil().div(4).clamp(min=0).nan_to_num(0.0)
    return scales.rows * 2.0**-octaves


def _too_fine(sample: Sample, step: Step, finest: float) -> dict[str, float]:
    """Return the tensors whose root mean square exceeds `finest` steps, with the ratio of the two."""
    spreads = {name: float(sample.values(name).square().mean()) ** 0.5 / step.size for name in sample.rows}
    return {name: spread / finest for name, spread in spreads.items() if spread > 1.02 * finest}


def _errors(sample: Sample, step: Step) -> Iterator[tuple[str, float]]:
    """Yield the sum of squared errors of each tensor, estimated from its sample, in units of `Sample.values`."""
    for name in sample.rows:
        values, factor, lengths = sample.values(name), sample.factor(name), step.lengths_of(name)
        codes = round_priced(values, step.size, lengths, lengths.worth)
        rounded = codes * scale_of(step.size, lengths.dependent)
        yield name, float((rounded - values).square().sum()) * factor
