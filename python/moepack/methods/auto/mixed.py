"""Chooses a format per tensor under two budgets, bytes and time: coded integers are small, fixed widths are fast.

The candidates of a tensor are fixed-width integers in groups and coded integers at selected rates. A price of time is
added to the price of bytes: each tensor has the candidate with the least loss + price * time on the hull that the
allocator finds for the bytes. `quality` has the price 0. `speed` has the price at which 1 % less time is worth 2 % more
loss. `balance` has the lowest price in between at which a step takes at most 1 / 0.7 of the time of `speed`, found by
bisection. Times are those of matrix products on the target (`moepack.backends.targets`), plus the rest of a decoding
step.

Losses are compared by the errors of rounded weights in the metric that counts all errors equally. With a text, the
tensors of either format are then solved on its inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moepack.allocation import Candidate, allocate
from moepack.backends.speeds import Speeds
from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.auto.coded import Coded, coded_within
from moepack.methods.auto.grouped import Grouped
from moepack.methods.auto.loss import expected_rise, solved_rise
from moepack.methods.auto.packer import Allocated
from moepack.methods.base import Expected, LayerPlan, PackedBytes, Shape, Solution, Weights
from moepack.methods.preference import BALANCE, Preference
from moepack.methods.rate.importance import Importance, role_of
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import Sample, take_sample
from moepack.methods.rate.step_size import Step, find_step, free_bits
from moepack.methods.reads import kept_reads, reads_by_tensor
from moepack.solvers.priced import BLOCK_ROWS, LEAST_DEPENDENT, WORTH, largest_at, low_bits_of, round_priced

__all__ = ["Alternatives", "Mixed"]

RUNGS = tuple(2.0 ** (number / 2) for number in range(-4, 7))
"""Proposed steps of coded integers, relative to the step at which coding all tensors meets the size: from about two
more to three fewer bits per weight."""

SEEN = 1 << 16
"""Approximate number of weights per tensor on which the rates of coded integers are measured."""

TIME_WORTH = 2.0
"""Percent of loss that one percent of time is worth. With less, most tensors would be coded: at equal bytes, these have
a fifth of the loss of fixed widths, and their products take four to five times as long."""

TURNS = 12
"""Maximum iterations for the price of time, which converges within five on all tested models."""

HALVINGS = 14
"""Steps of the bisection of the price of time; the time then misses its limit by less than a candidate of one tensor.
"""

DEPENDENT_GAIN = 0.85
"""Squared error of dependent codes relative to plain codes of the same size (docs/methods/rate.md)."""

CODED = "coded"

Candidates = dict[str, list[Candidate[Any]]]
"""Candidates by tensor name: first coded integers, whose format is `CODED`, then fixed widths."""

Picked = Mapping[str, int]
"""The position of the chosen candidate by tensor name."""


@dataclass(frozen=True)
class Alternatives:
    """The candidates of all tensors, with the time of their products.

    Attributes:
        found: candidates by tensor name.
        times: time per token of each of them in seconds.
        rest: time of a decoding step without these products in seconds.
        room: bytes for all tensors.
        roles: role of each tensor.
        bits: bits per weight of all tensors together.
        solved: whether tensors are solved on a text.
    """

    found: Candidates
    times: Mapping[str, Sequence[float]]
    rest: float
    room: int
    roles: Mapping[str, str]
    bits: float
    solved: bool

    @classmethod
    def of(
        cls,
        rate: Rate,
        checkpoint: Checkpoint,
        model: MoeModel,
        importance: Importance,
        room: int,
        shapes: Mapping[str, Shape],
        speeds: Speeds,
        apart: Collection[str] = (),
    ) -> Alternatives:
        """Propose all candidates.

        Args:
            rate: the method `rate`, with a text or without one.
            checkpoint, model: the model to pack.
            importance: importance of its tensors.
            room: bytes for all tensors.
            shapes: shapes of the tensors, by name.
            speeds: speeds of the machine that will run the model.
            apart: names of packed tensors whose bits are given; their products are not in the times.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
        """
        whole = coded_within(rate, room, shapes)
        largest = largest_at(whole.bits_per_weight)
        even = dict.fromkeys(importance.scales, 1.0)
        sample = take_sample(checkpoint, model, rate.dense_roles, even, importance.scales, largest, shapes)
        found: Candidates = {name: [] for name in sample.shapes}
        for name, one in _rates(sample, find_step(sample, whole.bits_per_weight), rate.codes == "dependent"):
            found[name].append(one)
        for name, one in Grouped.candidates(checkpoint, model, importance):
            if name in found:
                found[name].append(one)
        reads = reads_by_tensor(checkpoint, model)
        times = {
            name: [_seconds(one, sample.shapes[name], reads[name], speeds) for one in own]
            for name, own in found.items()
        }
        layers = max(len(model.dense), len(model.layers))
        rest = speeds.step(layers, kept_reads(checkpoint, model, {*shapes, *apart}))
        solved = rate.calibration is not None
        return cls(found, times, rest, room, role_of(model), whole.bits_per_weight, solved)

    def chosen(self) -> dict[str, Picked]:
        """Return the candidate of each tensor, by position, for each preference.

        If the room is smaller than the coarsest coded integers, whose sizes are estimates, all tensors are coded.
        """
        coarsest = self._coarsest()
        if sum(one.nbytes for one in self.taken(coarsest).values()) > self.room:
            return dict.fromkeys(("quality", "balance", "speed"), coarsest)
        coded = {name: [one.format == CODED for one in own] for name, own in self.found.items()}
        quality = self._allocated(0.0, coded)
        price, speed = self._fastest(quality)
        limit = self.seconds(speed) / BALANCE
        if self.seconds(quality) <= limit:
            return {"quality": quality, "balance": quality, "speed": speed}
        low, high, balance = 0.0, price, speed
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            picked = self._allocated(middle)
            if self.seconds(picked) > limit:
                low = middle
            else:
                high, balance = middle, min(balance, picked, key=self._loss)
        return {"quality": quality, "balance": balance, "speed": speed}

    def preferences(self, chosen: Mapping[str, Picked], measured: bool) -> tuple[Preference, ...]:
        """Describe the preferences; losses are known if the importance was measured."""
        return tuple(
            Preference(name, self.seconds(picked), self.rise(picked) if measured else None)
            for name, picked in chosen.items()
        )

    def taken(self, picked: Picked) -> dict[str, Candidate[Any]]:
        """Return the chosen candidates by tensor name."""
        return {name: self.found[name][number] for name, number in picked.items()}

    def seconds(self, picked: Picked) -> float:
        """Return the time of a decoding step."""
        return self.rest + sum(self.times[name][number] for name, number in picked.items())

    def rise(self, picked: Picked) -> float:
        """Return the expected loss increase in nats per token."""
        errors = Counter[str]()
        for name, one in self.taken(picked).items():
            errors[self.roles[name]] += 0.5 * one.loss  # type: ignore[assignment]
        return solved_rise(errors, self.bits) if self.solved else expected_rise(errors)

    def _loss(self, picked: Picked) -> float:
        return sum(one.loss for one in self.taken(picked).values())

    def _allocated(self, price: float, allowed: Mapping[str, Sequence[bool]] | None = None) -> Picked:
        """Return the choice at a price of time, within the bytes."""
        weighed = [
            [
                Candidate(one.format, number, one.nbytes, one.loss + price * time)
                for number, (one, time) in enumerate(zip(own, self.times[name], strict=True))
                if allowed is None or allowed[name][number]
            ]
            for name, own in self.found.items()
        ]
        choices = allocate(weighed, self.room)
        return {name: choice.candidate.specification for name, choice in zip(self.found, choices, strict=True)}

    def _fastest(self, start: Picked) -> tuple[float, Picked]:
        """Return the choice that minimizes loss * time^2, and its price of time; starts from a choice."""
        best, least, price, value = start, self._worth(start), 0.0, 0.0
        for _ in range(TURNS):
            picked = self._allocated(price)
            if self._worth(picked) < least:
                best, least, value = picked, self._worth(picked), price
            time = self.seconds(picked)
            if TIME_WORTH * self._loss(picked) / time == price:
                break
            price = TIME_WORTH * self._loss(picked) / time
        return value, best

    def _coarsest(self) -> Picked:
        numbers = {name: [at for at, one in enumerate(own) if one.format == CODED] for name, own in self.found.items()}
        return {name: min(own, key=lambda at: self.found[name][at].nbytes) for name, own in numbers.items()}

    def _worth(self, picked: Picked) -> float:
        return float(self._loss(picked) * self.seconds(picked) ** TIME_WORTH)


@dataclass(frozen=True)
class Mixed(Allocated):
    """Fixed widths for some tensors, coded integers for the others.

    Attributes:
        grouped: packs the tensors with a fixed width.
        coded: packs the others; None if there are none.
        errors, loss: see `Allocated`.
    """

    grouped: Grouped
    coded: Coded | None
    errors: Mapping[str, float]
    loss: float

    @classmethod
    def of(
        cls,
        rate: Rate,
        checkpoint: Checkpoint,
        model: MoeModel,
        importance: Importance,
        room: int,
        shapes: Mapping[str, Shape],
        taken: Mapping[str, Candidate[Any]],
        apart: Mapping[str, float] | None = None,
    ) -> Mixed:
        """Build a packer from chosen candidates by tensor name; other arguments and errors as for `Alternatives.of`."""
        grouped = Grouped.of(model, {name: one for name, one in taken.items() if one.format != CODED})
        left = room - sum(taken[name].nbytes for name in grouped.choices)
        rest = {name: shape for name, shape in shapes.items() if name not in grouped.choices}
        coded = Coded.within(rate, checkpoint, model, importance, left, rest, apart) if rest else None
        errors = Counter(grouped.errors)
        errors.update(coded.errors if coded else {})
        bits = coded_within(rate, room, shapes).bits_per_weight
        loss = expected_rise(errors) if rate.calibration is None else solved_rise(errors, bits)
        return cls(grouped, coded, errors, loss)

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

    def measure(self, stage: Stage) -> Any:
        """Measure the coded tensors of a stage; None if it has none."""
        names = [name for name, weights in stage.tensors.items() if weights.name not in self.fixed]
        return self.plan_of_coded.measure(stage.only(names)) if names else None

    def add(self, measured: Any) -> None:
        """Add a measurement."""
        if measured is not None:
            self.plan_of_coded.add(measured)

    def begin(self, wave: Sequence[range]) -> None:
        """Begin a wave."""
        self.plan_of_coded.begin(wave)

    def apart(self, names: Collection[str]) -> _CodedPart:
        """Return a copy for the tensors in `names`."""
        return replace(self, plan_of_coded=self.plan_of_coded.apart(names), fixed=[*{*self.fixed} & {*names}])

    def taken(self, group: range) -> Any:
        """Return what the coded tensors of a group took."""
        return self.plan_of_coded.taken(group)

    def take(self, group: range, taken: Any) -> None:
        """Account for a group."""
        self.plan_of_coded.take(group, taken)


def _rates(sample: Sample, step: Step, dependent: bool) -> Iterator[tuple[str, Candidate[Any]]]:
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
            if (
                dependent
                and bits >= LEAST_DEPENDENT * math.prod(sample.shapes[name])
                and not low_bits_of(lengths.largest)
            ):
                error *= DEPENDENT_GAIN
            yield name, Candidate(CODED, size, math.ceil(bits / 8), error)


def _blocks(values: Tensor) -> Tensor:
    """Return evenly spaced whole row blocks of a matrix [R, C]."""
    rows, columns = values.shape
    count = max(SEEN // max(BLOCK_ROWS * columns, 1), 1)
    first = torch.arange(0, rows, BLOCK_ROWS * max(rows // (BLOCK_ROWS * count), 1))
    places = (first[:, None] + torch.arange(BLOCK_ROWS)).flatten()
    return values[places[places < rows]]


def _seconds(one: Candidate[Any], shape: Shape, read: float, speeds: Speeds) -> float:
    """Return the time of a tensor's products per token in seconds, if a token reads a share of its weights."""
    weights = math.prod(shape)
    if one.format == CODED:
        bits, kind = 8 * one.nbytes / max(weights, 1), CODED
    else:
        bits, kind = one.specification[0], "int"
    return speeds.seconds(kind, bits, weights * read, one.nbytes * read)
