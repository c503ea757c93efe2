"""Chooses a format per tensor for `prefer="speed"`: coded integers are small, fixed widths are fast.

The candidates of a tensor are fixed-width integers in groups and coded integers at selected rates. The choice minimizes
the expected loss times the square of the time per token within the given bytes: 1 % less time is worth 2 % more loss.
Times are those of matrix products on this machine (`moepack.backends.speeds`). Rows of an embedding that is not also
the head are looked up and take no time.

Losses are compared by the errors of rounded weights in the metric that counts all errors equally. With a text, the
tensors of either format are then solved on its inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moepack.allocation import Candidate, allocate
from moepack.allocation.importance import visits
from moepack.backends.speeds import token_seconds
from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.checkpoint.dense import EMBEDDING
from moepack.methods.auto.coded import Coded, coded_within
from moepack.methods.auto.grouped import Grouped
from moepack.methods.auto.loss import expected_rise, solved_rise
from moepack.methods.auto.packer import Allocated
from moepack.methods.base import Expected, LayerPlan, PackedBytes, Shape, Solution, Weights
from moepack.methods.rate.importance import Importance
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import Sample, take_sample
from moepack.methods.rate.step_size import Step, find_step, free_bits
from moepack.solvers.priced import BLOCK_ROWS, WORTH, largest_at, round_priced

__all__ = ["Mixed"]

RUNGS = tuple(2.0 ** (number / 2) for number in range(-4, 7))
"""Proposed steps of coded integers, relative to the step at which coding all tensors meets the size: from about two
more to three fewer bits per weight."""

SEEN = 1 << 17
"""Approximate number of weights per tensor on which the rates of coded integers are measured."""

TIME_WORTH = 2.0
"""Percent of loss that one percent of time is worth. With less, most tensors would be coded: at equal bytes, these have
a fifth of the loss of fixed widths, and their products take four to five times as long."""

TURNS = 12
"""Maximum iterations for the price of time, which converges within five on all tested models."""

CODED = "coded"

Candidates = dict[str, list[Candidate[Any]]]
"""Candidates by tensor name: first coded integers, whose format is `CODED`, then fixed widths."""


@dataclass(frozen=True)
class Mixed(Allocated):
    """Fixed widths for some tensors, coded integers for the others.

    Attributes:
        grouped: packs the tensors with a fixed width.
        coded: packs the others; None if there are none.
        errors, loss: see `Allocated`.
        seconds: time of all products of packed weights per token on this machine.
    """

    grouped: Grouped
    coded: Coded | None
    errors: Mapping[str, float]
    loss: float
    seconds: float

    @classmethod
    def chosen(
        cls,
        rate: Rate,
        checkpoint: Checkpoint,
        model: MoeModel,
        importance: Importance,
        room: int,
        shapes: Mapping[str, Shape],
        speeds: Mapping[str, float],
        apart: Mapping[str, float] | None = None,
    ) -> Mixed:
        """Choose a format for each tensor within `room` bytes.

        Args:
            rate: the method `rate`, with a text or without one.
            checkpoint, model: the model to pack.
            importance: importance of its tensors.
            room: bytes for all tensors.
            shapes: shapes of the tensors, by name.
            speeds: weights per second by format.
            apart: see `Coded`.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
        """
        whole = coded_within(rate, room, shapes)
        largest = largest_at(whole.bits_per_weight)
        even = dict.fromkeys(importance.scales, 1.0)
        sample = take_sample(checkpoint, model, rate.dense_roles, even, importance.scales, largest, shapes)
        found: Candidates = {name: [] for name in sample.shapes}
        for name, one in _rates(sample, find_step(sample, whole.bits_per_weight)):
            found[name].append(one)
        for name, one in Grouped.candidates(checkpoint, model, importance):
            if name in found:
                found[name].append(one)
        visited = _visits(checkpoint, model)
        times = {
            name: [_seconds(one, sample.shapes[name], visited[name], speeds) for one in own]
            for name, own in found.items()
        }
        picked = _balanced(found, times, room)
        taken = {name: found[name][number] for name, number in picked.items()}
        grouped = Grouped.of(model, {name: one for name, one in taken.items() if one.format != CODED})
        left = room - sum(taken[name].nbytes for name in grouped.choices)
        rest = {name: shape for name, shape in shapes.items() if name not in grouped.choices}
        coded = Coded.within(rate, checkpoint, model, importance, left, rest, apart) if rest else None
        errors = Counter(grouped.errors)
        errors.update(coded.errors if coded else {})
        loss = expected_rise(errors) if rate.calibration is None else solved_rise(errors, whole.bits_per_weight)
        return cls(grouped, coded, errors, loss, sum(times[name][number] for name, number in picked.items()))

    @property
    def identity(self) -> str:
        """Digest of all choices, which determine the output together with the size."""
        return self.grouped.identity

    def _of(self, name: str) -> Allocated:
        if self.coded is None or name in self.grouped.choices:
            return self.grouped
        return self.coded

    def expected(self, weights: Weights) -> Expected:
        """Return the expected size of a tensor in its chosen format."""
        return self._of(weights.name).expected(weights)

    @property
    def decisions(self) -> Mapping[str, Any]:
        """The bits and the group size, or the step, of each tensor."""
        return {**({} if self.coded is None else self.coded.decisions), **self.grouped.decisions}

    def layer_plan(self, experts: int, spent: Mapping[str, int]) -> LayerPlan | None:
        """Return the plan of a layer's coded tensors, which share bits if there is a text."""
        own = None if self.coded is None else self.coded.layer_plan(experts, self._coded_sizes(spent))
        return None if own is None else _CodedPart(own, self.grouped.choices)

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize tensors in their chosen formats; coded tensors compensate for the sizes of earlier ones."""
        plan = stage.plan.plan_of_coded if isinstance(stage.plan, _CodedPart) else stage.plan
        stage = replace(stage, spent=self._coded_sizes(stage.spent), plan=plan)
        if stage.inputs is None:
            (weights,) = stage.tensors.values()
            return self._of(weights.name).solve(stage)
        stage = stage.with_cached_moments()
        found: dict[str, Solution] = {}
        for packer in (self.grouped, self.coded):
            names = [name for name, weights in stage.tensors.items() if self._of(weights.name) is packer]
            if packer is not None and names:
                found |= packer.solve(stage.only(names))
        return found

    def _coded_sizes(self, spent: Mapping[str, int]) -> dict[str, int]:
        return {name: nbytes for name, nbytes in spent.items() if name not in self.grouped.choices}

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return () if self.coded is None else self.coded.notes(layers)

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack a tensor in its chosen format."""
        return self._of(weights.name).pack(weights, solution)


@dataclass(frozen=True)
class _CodedPart:
    """The plan of a layer, which sees only coded tensors."""

    plan_of_coded: LayerPlan
    fixed: Collection[str]

    def plan(self, stage: Stage) -> None:
        """Inspect the coded tensors of a stage."""
        names = [name for name, weights in stage.tensors.items() if weights.name not in self.fixed]
        if names:
            self.plan_of_coded.plan(stage.only(names))


def _rates(sample: Sample, step: Step) -> Iterator[tuple[str, Candidate[Any]]]:
    """Yield each tensor as coded integers at each of `RUNGS`, measured on some of its row blocks."""
    seen = {name: _blocks(sample.values(name)) for name in sample.rows}
    for rung in RUNGS:
        size = step.size * rung
        lengths = sample.profile.lengths(size, WORTH)
        for name, values in seen.items():
            factor = math.prod(sample.shapes[name]) / max(values.numel(), 1)
            symbols = round_priced(values, size, lengths, WORTH)
            bits = factor * lengths.total(values, symbols) + free_bits(sample.shapes[name])
            error = factor * float((symbols * size - values).square().sum(dtype=torch.float64))
            yield name, Candidate(CODED, size, math.ceil(bits / 8), error)


def _blocks(values: Tensor) -> Tensor:
    """Return evenly spaced whole row blocks of a matrix [R, C]."""
    rows, columns = values.shape
    count = max(SEEN // max(BLOCK_ROWS * columns, 1), 1)
    first = torch.arange(0, rows, BLOCK_ROWS * max(rows // (BLOCK_ROWS * count), 1))
    places = (first[:, None] + torch.arange(BLOCK_ROWS)).flatten()
    return values[places[places < rows]]


def _visits(checkpoint: Checkpoint, model: MoeModel) -> dict[str, float]:
    """Return the average number of products per token and weight, by tensor name."""
    chosen, tied = described(model.architecture).top_k(checkpoint.config), checkpoint.config.get("tie_word_embeddings")
    found = {part.packed_name: visits(chosen, layer.experts) for layer in model.layers for part in layer.projections}
    linears = (linear for dense in model.dense for linear in dense.linears)
    return found | {linear.source: float(linear.role != EMBEDDING or bool(tied)) for linear in linears}


def _seconds(one: Candidate[Any], shape: Shape, visited: float, speeds: Mapping[str, float]) -> float:
    """Return the time of a tensor's products per token in seconds."""
    weights = math.prod(shape)
    if one.format == CODED:
        return token_seconds("coded", 8 * one.nbytes / max(weights, 1), weights * visited, speeds)
    return token_seconds("int", one.specification[0], weights * visited, speeds)


def _balanced(found: Candidates, times: Mapping[str, list[float]], room: int) -> dict[str, int]:
    """Return the candidate of each tensor, by position: those that minimize loss * time^2 within `room` bytes."""
    best: dict[str, int] = {}
    least, price = math.inf, 0.0
    for _ in range(TURNS):
        weighed = [
            [
                Candidate(one.format, number, one.nbytes, one.loss + price * time)
                for number, (one, time) in enumerate(zip(own, times[name], strict=True))
            ]
            for name, own in found.items()
        ]
        picked = [choice.candidate.specification for choice in allocate(weighed, room)]
        loss = sum(own[number].loss for own, number in zip(found.values(), picked, strict=True))
        time = sum(own[number] for own, number in zip(times.values(), picked, strict=True))
        if loss * time**TIME_WORTH < least:
            best, least = dict(zip(found, picked, strict=True)), loss * time**TIME_WORTH
        if not time or TIME_WORTH * loss / time == price:
            break
        price = TIME_WORTH * loss / time
    return best
