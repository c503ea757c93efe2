"""The calibrated form of `rate`: the model's step fixes each layer's bits, and the text decides where they go.

A model's bits are divided among layers as without a text (`step_size`), so a layer depends on earlier layers only
through its inputs. Within a layer, one price of a bit applies to all projections and experts. Errors are weighted by
the Hessians, which share one unit (`moepack.calibration.moments`). A projection has one step, at which its experts pay
the price on average; more or less important experts give code length less or more weight when rounding.

Sampled rows of every matrix determine the initial price before the first stage is solved. The actual bits of each group
of experts are then recorded, and the price is updated for the next wave of groups (`LayerPlan`), whose groups all pay
it. The first group of a projection is solved once more, because compensated weights are wider than the sampled ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moepack.allocation import Curves, PricedBudget
from moepack.arrays import in_host_memory, narrowed
from moepack.backends.gpu import trellis
from moepack.backends.gpu.device import supports
from moepack.calibration import Stage
from moepack.methods.base import Shape, Solution
from moepack.methods.rate.sample import stream_rows
from moepack.methods.rate.scales import Scales
from moepack.methods.rate.step_size import encoded, free_bits, once_bytes
from moepack.solvers.priced import (
    LEAST_DEPENDENT,
    NEARLY_ZERO,
    WORTH,
    WORTH_OF_DEPENDENT,
    least_spread,
    scale_of,
)
from moepack.solvers.ridge import with_ridge
from moepack.solvers.search import smallest_within
from moepack.solvers.uniform import CodeLengths, UniformProblem, UniformSettings, sampled_lengths, step_of

__all__ = ["LayerSolver", "parts_of", "solved_apart"]

ROWS, COLUMNS = 16, 512
"""Rows and columns of a matrix that are sampled in advance."""

LADDER = 2.0 ** (torch.arange(-12, 13, dtype=torch.float64) / 4)
"""Prices at which a layer's bits are known, relative to its initial price."""

LOWEST, HIGHEST, EXACT = -40.0, 8.0, 0.004
"""Search range of the price in octaves, relative to the mean loss of a weight rounded to zero; and its precision."""

PASSES, TOLERANCE = 4, 0.001
"""Maximum passes over a group, at least two because lengths depend on codes; relative tolerance of a layer's bits."""


@dataclass
class _Outlook:
    """A sample of a stage, taken before it is solved.

    Attributes:
        weights: [E, K, C'] sampled weights of its matrices.
        curvature: [E].
        scale: number of weights that each sampled weight represents.
        settings: settings of the solver.
        narrowest: the smallest root mean square of a row block.
        step: the step, once it is decided.
        dependent: whether codes are dependent, once the price is known.
    """

    weights: Tensor
    curvature: Tensor
    scale: float
    settings: UniformSettings
    narrowest: float = math.inf
    step: float | None = None
    dependent: bool = False

    def step_at(self, price: float) -> float:
        """Return the decided step, or the step at `price`."""
        if self.step is not None:
            return self.step
        return step_of(price, float(self.curvature.mean()), self.settings.worth)

    def lengths(self, price: float) -> CodeLengths:
        """Return code lengths at a price, one run per expert."""
        step = self.step_at(price)
        prices = (price / (step * step * self.curvature)).float()
        prices = prices * (WORTH_OF_DEPENDENT / WORTH) if self.dependent else prices
        return sampled_lengths(self.weights / step, prices, self.settings.largest, dependent=self.dependent)

    def bits(self, price: float) -> Tensor:
        """Return the bits of each expert at a price, [E] float64."""
        return self.lengths(price).totals * self.scale

    def decide(self, price: float) -> None:
        """Choose dependent codes if there are enough bits for them at a price."""
        many = float(self.bits(price).sum()) >= LEAST_DEPENDENT * self.weights.numel() * self.scale
        wide = self.narrowest >= NEARLY_ZERO * self.step_at(price)
        self.dependent = self.settings.dependent and many and wide

    @property
    def loss(self) -> float:
        """Approximate loss of a weight rounded to zero; large weights, which are few, count little."""
        return float((self.curvature * self.weights.abs().mean((1, 2)).square()).mean()) if self.weights.numel() else 0


class _Measured(NamedTuple):
    """A sample of a group of experts in a stage.

    Attributes:
        stage: name of the stage.
        shapes: shapes of its tensors, by name.
        experts: the experts.
        weights, curvature, scale, narrowest: see `_Outlook`; weights [G, K, C'] and curvature [G] of the group.
    """

    stage: str
    shapes: Mapping[str, Shape]
    experts: range
    weights: Tensor
    curvature: Tensor
    scale: float
    narrowest: float


class LayerSolver:
    """Solves the stages of one layer so that it meets its bit budget: a `moepack.methods.base.LayerPlan`."""

    def __init__(
        self,
        bits: Mapping[str, float],
        settings: UniformSettings | None = None,
        scales: Mapping[str, Scales] | None = None,
    ) -> None:
        """Start a layer.

        Args:
            bits: budget of each tensor in bits by name, including all metadata.
            settings: settings of the solver.
            scales: factors of rows and columns by tensor name; the solver rounds the product of weights and factors.
        """
        self._bits, self._settings, self._scales = bits, settings or UniformSettings(), scales or {}
        self._outlooks: dict[str, _Outlook] = {}
        self._given, self._unit = 0.0, 1.0
        self._budget: PricedBudget | None = None

    def measure(self, stage: Stage) -> _Measured:
        """Sample a stage before any is solved."""
        weights, curvature = self._sampled(stage)
        _, rows, columns = weights.shape
        picked, across = _even(rows, ROWS), _even(columns, COLUMNS)
        return _Measured(
            _name(stage), {tensor.name: tensor.shape for tensor in stage.tensors.values()}, stage.experts,
            weights[:, picked][:, :, across].cpu(), curvature.cpu(),
            rows * columns / max(len(picked) * len(across), 1), least_spread(weights),
        )  # fmt: skip

    def add(self, measured: _Measured) -> None:
        """Add a sample."""
        name, shapes, own = measured.stage, measured.shapes, measured.weights
        if name not in self._outlooks:
            self._given += sum(self._bits[tensor] - self._free(tensor, shape) for tensor, shape in shapes.items())
            experts = next(iter(shapes.values()))[0]
            empty = torch.zeros(experts, *own.shape[1:])
            self._outlooks[name] = _Outlook(empty, torch.ones(experts), measured.scale, self._settings)
        group, outlook = slice(measured.experts.start, measured.experts.stop), self._outlooks[name]
        outlook.narrowest = min(outlook.narrowest, measured.narrowest)
        outlook.weights[group], outlook.curvature[group] = own, measured.curvature

    def begin(self, wave: Sequence[range]) -> None:
        """Fix the price of a wave of several groups; that of a single group is updated while it is solved."""
        if self._outlooks:
            common = range(wave[0].start, wave[-1].stop) if len(wave) > 1 else None
            (self._budget or self._start()).share(common)

    def apart(self, names: Collection[str]) -> LayerSolver:
        """Return a copy for the tensors in `names`."""
        found = copy(self)
        found._bits = {name: bits for name, bits in self._bits.items() if name in names}
        found._scales = {name: scales for name, scales in self._scales.items() if name in names}
        return found

    def taken(self, group: range) -> dict[str, Tensor]:
        """Return the bits of a solved group, by stage."""
        return {} if self._budget is None else self._budget.taken(group)

    def take(self, group: range, taken: Mapping[str, Tensor]) -> None:
        """Record the bits of a group that a copy solved."""
        if self._budget is not None:
            self._budget.take(group, taken)

    def _sampled(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """Return the weights [G, R, C] and the curvature [G] that the initial price is found from.

        If all errors count equally, the Hessians do not influence it, and they are not computed. The weights then lack
        the correction of the drift, which changes their size little. The first solution corrects the price anyway.
        """
        if self._settings.even:
            weights = self._weights(stage)
            return weights, torch.ones(len(weights))
        problem = self._problem(stage)
        return problem.weights, problem.curvature

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a stage; all its tensors form one problem."""
        name = _name(stage)
        budget, outlook = self._budget or self._start(), self._outlooks[name]
        problem = self._problem(stage, outlook.dependent)
        runs = _runs(stage).to(problem.weights.device)
        lengths: CodeLengths | None = None
        for number in range(PASSES):
            price = self._unit * budget.price(name, stage.experts)
            step = outlook.step_at(price)
            result = problem.solve(step, price, lengths or _expected(outlook, price, stage, problem.weights))
            lengths = CodeLengths.counted(result.codes, runs, self._settings.largest, dependent=outlook.dependent)
            if number == 0 and budget.is_shared and outlook.step is not None:
                continue  # the next pass pays the same price, and records its bits instead
            stored = _stored_bits(stage, result.codes, self._settings.largest, outlook.dependent)
            budget.record_bits(name, stage.experts, stored)
            excess = budget.excess()
            if outlook.step is None:
                outlook.step = outlook.step_at(self._unit * budget.price(name, stage.experts))
                budget.expect(name, self._curve(outlook))
            elif number and (excess is None or abs(excess) <= TOLERANCE):
                break
        reports = zip(stage.experts, result.reports, strict=True)
        rounded = {expert: report.reason for expert, report in reports if report.reason is not None}
        stage.advance(result.codes.numel())
        scale = scale_of(step, outlook.dependent)
        scales = torch.full((len(stage.experts), 1), scale)
        return {
            tensor: Solution(
                parts_of(codes, scales, outlook.dependent),
                self._values(stage, tensor, codes, scale),
                rounded=rounded,
            )
            for tensor, codes in _by_tensor(stage, result.codes).items()
        }

    def _start(self) -> PricedBudget:
        """Find the layer's initial price by a search, and its bits at other prices."""
        self._unit = self._price()
        for outlook in self._outlooks.values():
            outlook.decide(self._unit)
        if any(outlook.dependent for outlook in self._outlooks.values()):
            self._unit = self._price()
        curves = {name: self._curve(outlook) for name, outlook in self._outlooks.items()}
        self._budget = PricedBudget(self._given, LADDER, curves)
        return self._budget

    def _price(self) -> float:
        """Return the price at which the sampled layer meets its budget."""
        outlooks = self._outlooks.values()
        center = math.log2(max(sum(outlook.loss for outlook in outlooks) / len(outlooks), 1e-30))
        weights = sum(outlook.weights.numel() * outlook.scale for outlook in outlooks)

        def bits(exponent: float) -> float:
            return sum(float(outlook.bits(2.0**exponent).sum()) for outlook in outlooks)

        # Steps grow with the root of the price, and twice the step takes about one bit less per weight.
        fall = max(0.5 * weights, 1.0)
        return float(2.0 ** smallest_within(bits, self._given, center + LOWEST, center + HIGHEST, EXACT, fall))

    def _curve(self, outlook: _Outlook) -> Curves:
        """Return the bits of a stage relative to the layer's price, as decided until now."""
        return Curves(len(outlook.weights), partial(_ladder_bits, replace(outlook), self._unit))

    def _problem(self, stage: Stage, dependent: bool = False) -> UniformProblem:
        # Linear layers outside the experts lose less without drift correction (docs/methods/qmoe.md).
        moments = stage.moments(drift=not stage.dense)
        assert stage.inputs is not None
        hessians, drift = with_ridge(moments.hessians, stage.inputs.tokens), moments.drift
        del moments  # the largest tensors of a job; the stage may keep them
        if (factors := self._divisors(stage)) is not None:
            hessians = _divided(hessians, *factors)
            drift = None if drift is None else _divided(drift, *factors)
        weights = self._weights(stage)
        search = trellis.solve_dependent if supports(weights.device) else None
        return UniformProblem(weights, hessians, drift, self._settings, dependent=dependent, search=search)

    def _weights(self, stage: Stage) -> Tensor:
        """Return the weights of all tensors of a stage, times their factors, [G, R, C]."""
        factors = [self._factors(stage, tensor) for tensor in stage.weights]
        return torch.cat([own * scale for own, scale in zip(stage.weights.values(), factors, strict=True)], 1)

    def _divisors(self, stage: Stage) -> tuple[Tensor, Tensor] | None:
        """Return factors of columns [G, C] and counts [G] that divide a stage's moments, if its weights have factors.

        Inputs are divided by the factors of columns, which the stage's tensors share, and output errors by those of
        rows.
        """
        known = [self._scales.get(stage.tensors[name].name) for name in stage.weights]
        factors = [scales.of(stage.experts) for scales in known if scales is not None]
        if not factors:
            return None
        rows, columns = torch.cat([rows for rows, _ in factors], 1), factors[0][1]
        device = next(iter(stage.weights.values())).device
        return columns.to(device), rows.square().reciprocal().mean(1).to(device)

    def _factors(self, stage: Stage, tensor: str) -> Tensor:
        """Return the factors of a tensor's weights in a stage, broadcastable to [G, R, C]."""
        scales, device = self._scales.get(stage.tensors[tensor].name), stage.weights[tensor].device
        if scales is None:
            return torch.ones((), device=device)
        rows, columns = (each.to(device) for each in scales.of(stage.experts))
        return rows[..., None] * columns[:, None]

    def _values(self, stage: Stage, tensor: str, codes: Tensor, scale: float) -> Tensor:
        """Return the values of codes [G, R, C] as stored."""
        scales = self._scales.get(stage.tensors[tensor].name)
        if scales is None:
            return codes * scale
        rows, columns = (each.to(codes.device) for each in scales.stored(scale, stage.experts))
        return codes * rows[..., None] * columns[:, None]

    def _free(self, tensor: str, shape: Shape) -> float:
        """Return the bits of a tensor without its symbols."""
        return free_bits(shape) + (self._scales[tensor].bits if tensor in self._scales else 0)


def solved_apart(stage: Stage, solver: Callable[[], LayerSolver]) -> dict[str, Solution]:
    """Solve linear layers with the same input one by one, because errors of their columns have different weights."""
    found: dict[str, Solution] = {}
    known = stage.with_cached_moments()
    for name in stage.tensors:
        own, part = solver(), known.only([name])
        own.add(own.measure(part))
        found |= own.solve(part)
    return found


def _divided(moments: Tensor, columns: Tensor, counts: Tensor) -> Tensor:
    """Return moments [G, C, C] divided by products of the factors of columns [G, C] and multiplied by counts [G].

    Each matrix is divided alone, so that the divisors of the group take no memory.
    """
    found = torch.empty_like(moments)
    count = len(moments)
    for own, out, factors, tokens in zip(moments, found, columns.expand(count, -1), counts.expand(count), strict=True):
        torch.div(own, factors[:, None] * factors / tokens, out=out)
    return found


def parts_of(codes: Tensor, scales: Tensor, dependent: bool) -> dict[str, Tensor]:
    """Return a solution's parts.

    These are the codes [G, R, C], the value of one code step, [G, 1] or [1, 1], and whether codes are dependent.
    """
    return {"codes": codes, "scale": scales, "dependent": torch.full(scales.shape, dependent)}


def _name(stage: Stage) -> str:
    return " ".join(stage.weights)


def _even(length: int, most: int) -> Tensor:
    """Return at most `most` evenly spaced positions."""
    return torch.linspace(0, length - 1, min(most, length), dtype=torch.float64).round().long()


def _by_tensor(stage: Stage, codes: Tensor) -> dict[str, Tensor]:
    """Split the codes [G, R, C] of a stage by tensor."""
    rows = [weights.shape[1] for weights in stage.weights.values()]
    return dict(zip(stage.weights, torch.split(codes, rows, dim=1), strict=True))


def _runs(stage: Stage) -> Tensor:
    """Return the stream of each row, [G, R] int64; the rows of a stream share a table."""
    rows: list[Tensor] = []
    first = 0
    for weights in stage.weights.values():
        _, height, columns = weights.shape
        rows.append(first + torch.arange(height) // stream_rows(columns))
        first += -(-height // stream_rows(columns))
    return torch.cat(rows) + first * torch.arange(len(stage.experts))[:, None]


def _expected(outlook: _Outlook, price: float, stage: Stage, weights: Tensor) -> CodeLengths:
    """Return code lengths for the first pass over a group's weights [G, R, C]."""
    table = outlook.lengths(price).table[stage.experts.start : stage.experts.stop].to(weights.device)
    runs = torch.arange(len(table), device=weights.device)[:, None].expand(weights.shape[:2])
    return CodeLengths(table.contiguous(), runs, torch.zeros(0))


def _ladder_bits(outlook: _Outlook, unit: float, number: int) -> Tensor:
    """Return the bits of each expert at a price of the ladder, [E] float64."""
    return outlook.bits(unit * float(LADDER[number]))


def _stored_bits(stage: Stage, codes: Tensor, largest: int, dependent: bool) -> Tensor:
    """Return the size in bits of a group's coded codes [G, R, C] minus `free_bits`; [G] float64, divided equally."""
    bits = 0.0
    for name, own in _by_tensor(stage, codes).items():
        shape = stage.tensors[name].shape
        blob = encoded(in_host_memory(narrowed(own)), largest, dependent)
        once, share = once_bytes(blob), len(own) / shape[0]
        bits += 8 * (blob.nbytes - once * (1 - share)) - free_bits(shape) * share
    return torch.full((len(codes),), bits / max(len(codes), 1), dtype=torch.float64)
