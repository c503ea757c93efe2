"""Packs one layer: methods solve its stages, and the solutions are combined and packed.

Tensors that are already packed are answered from their bytes, no matter which method packed them: tensors of an
interrupted run, tensors of methods that use no inputs (packed first, one by one), and tensors packed elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moepack import _core
from moepack.arrays import in_host_memory, magnitude, narrowed
from moepack.calibration import LayerRun, Stage, Weights
from moepack.calibration.stage import Fetch, WholeTensor
from moepack.errors import MoepackWarning
from moepack.memory import release_unused
from moepack.methods import LayerPlan, MethodPlan, PackedBytes, Solution
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.overflow import LARGEST, near_limit
from moepack.registry import open_tensor

__all__ = ["LayerWork", "Measured", "Packed", "pack_run"]

Packed = Mapping[str, PackedBytes]
"""Packed tensors of a layer by projection name or linear layer path."""


@torch.no_grad()
def pack_run(
    run: LayerRun,
    known: Packed,
    assignment: PlannedAssignment,
    advance: Callable[[int], None],
    spent: Mapping[str, int],
) -> dict[str, PackedBytes]:
    """Solve and answer all stages of a run; return the packed tensors that were not known."""
    work = LayerWork(run, known, assignment, advance, spent)
    work.look_ahead()
    work.answer()
    return work.pack()


Measured = tuple[int, Any]
"""The number of a layer plan, and what it measured of a stage."""


class LayerWork:
    """Collects the solutions of a layer's tensors, one group of experts at a time.

    Attributes:
        distinct: the distinct plans of the tensors to solve.
        layer_plans: the layer plans of those that have one, by position in `distinct`.
        half: magnitudes of float16 weights that were read, by tensor.
    """

    def __init__(
        self,
        run: LayerRun,
        known: Packed,
        assignment: PlannedAssignment,
        advance: Callable[[int], None],
        spent: Mapping[str, int],
    ) -> None:
        self.run, self.known, self.advance, self.main = run, known, advance, assignment.plan
        own = assignment.plan.method.pinned
        self.pinned = {name for name, weights in run.tensors.items() if own and weights.name in own.methods}
        self.spent = dict(spent)
        self.plans: dict[str, MethodPlan] = {}
        for name, weights in run.tensors.items():
            if name not in known and isinstance(plan := assignment.of(weights), MethodPlan):
                self.plans[name] = plan
        self.distinct = list({id(plan): plan for plan in self.plans.values()}.values())
        self.layer_plans: dict[int, LayerPlan] = {}
        self.values: dict[str, Tensor] = {}
        self.solutions: dict[str, Solution] = {}
        self.rounded: dict[str, dict[int, str]] = {}
        self.half: dict[str, list[float]] = {}
        for name, weights in run.tensors.items():
            if weights.dtype == torch.float16:
                self.half[name] = []
                run.tensors[name] = replace(weights, expert=self._observed(name, weights))

    def look_ahead(self) -> None:
        """Create the layer plans, and show them all stages before the first is solved."""
        self.create_plans()
        if self.layer_plans:
            self.add(self.measured())

    def create_plans(self) -> None:
        """Create the layer plans of methods whose experts share something."""
        if self.run.tokens is None:
            return
        experts = next(iter(self.run.tensors.values())).shape[0]
        for number, plan in enumerate(self.distinct):
            if (found := plan.packer.layer_plan(experts, self.spent)) is not None:
                self.layer_plans[number] = found

    def measured(self) -> Iterator[Measured]:
        """Measure all stages for the layer plans."""
        for stage in self.run.previews():
            with self.run.smaller_groups():
                stage = stage.with_cached_moments() if len(self.layer_plans) > 1 else stage
                for number, found in self.layer_plans.items():
                    if names := self._names(stage, self.distinct[number]):
                        yield number, found.measure(stage.only(names).finite())

    def add(self, measured: Iterable[Measured]) -> None:
        """Add measurements to the layer plans."""
        for number, each in measured:
            self.layer_plans[number].add(each)

    def begin(self, wave: Sequence[range]) -> None:
        """Begin a wave of groups."""
        for plan in self.layer_plans.values():
            plan.begin(wave)

    def _observed(self, name: str, weights: Weights) -> Fetch:
        """Return a function that returns an expert's float16 weights and records their magnitude.

        Methods may call it in threads.
        """

        def expert(index: int, device: torch.device | None = None) -> Tensor:
            found = weights.expert(index, device)
            self.half[name].append(magnitude(found))
            return found

        return expert

    def answer(self) -> None:
        """Solve and answer all stages of the run."""
        waves = {wave[0].start: wave for wave in self.run.waves}
        for stage in self.run:
            if wave := waves.pop(stage.experts.start, None):
                self.begin(wave)
            with self.run.smaller_groups():
                self.run.answer(self.solve(stage))
            release_unused()

    def solve(self, stage: Stage) -> dict[str, Tensor]:
        """Return the values of a stage's tensors, from their packed bytes or from their methods."""
        values = {name: self._values(name)[_slice(stage.experts)] for name in stage.tensors if name in self.known}
        stage = stage.with_cached_moments() if len(self.distinct) > 1 and stage.inputs is not None else stage
        for number, plan in enumerate(self.distinct):
            if names := self._names(stage, plan):
                layer_plan = self.layer_plans.get(number)
                part = replace(stage.only(names), plan=layer_plan, spent=self.spent, advance=self.advance)
                for name in self.half.keys() & part.weights.keys():
                    self.half[name].append(magnitude(part.weights[name]))
                solutions = plan.packer.solve(part.finite())
                if missing := sorted({*names} - {*solutions}):
                    full = ", ".join(stage.tensors[name].name for name in missing)
                    raise ValueError(f"the method {plan.method.name} returned no solution for {full}")
                for name, solution in solutions.items():
                    self.put(name, stage.experts, solution)
                    if solution.values is not None:
                        values[name] = solution.values
        return values

    def pack(self) -> dict[str, PackedBytes]:
        """Pack the solutions. The details of the first expert tensor record what calibration saw of the layer."""
        found = {}
        for position, (name, solution) in enumerate(self.solutions.items()):
            plan, weights = self.plans[name], self.run.tensors[name]
            packed = plan.packer.pack(weights, solution)
            _warn_of_vanished(packed, weights)
            more: dict[str, Any] = {} if plan is self.main or name in self.pinned else {"method": plan.method.name}
            if near_limit(largest := max(self.half.get(name, ()), default=0.0)):
                more[LARGEST] = largest
            if weights.ndim == 2:
                reason = self.rounded[name].get(0)
                more |= {"role": weights.role, **({} if reason is None else {"rounded": reason})}
            elif self.run.tokens is not None and position == 0:
                reasons: dict[int, str] = {}
                for each in self.rounded.values():
                    reasons = {**each, **reasons}
                more |= {"tokens": self.run.tokens.tolist(), "rounded": {str(e): why for e, why in reasons.items()}}
            found[name] = PackedBytes(packed.kind, packed.data, {**solution.details, **packed.details, **more})
        return found

    def _names(self, stage: Stage, plan: MethodPlan) -> list[str]:
        return [name for name in stage.tensors if self.plans.get(name) is plan]

    def _values(self, name: str) -> Tensor:
        if name not in self.values:
            self.values[name] = _dequantized(self.known[name]).view(self.run.tensors[name].shape)
        return self.values[name]

    def put(self, name: str, experts: range, solution: Solution) -> None:
        """Store a solution to pack. Experts that are solved again in smaller groups replace earlier solutions."""
        self.rounded.setdefault(name, {}).update(solution.rounded)
        count = self.run.tensors[name].shape[0]
        if isinstance(self.run, WholeTensor):
            self.solutions[name] = solution
            return
        if name not in self.solutions:
            self.solutions[name] = Solution({})
        kept = self.solutions[name].parts
        assert isinstance(kept, dict), "solutions of parts are created above"
        for key, part in solution.parts.items():
            narrow = in_host_memory(narrowed(part))  # codes of a whole layer are kept
            if key not in kept:
                kept[key] = torch.empty((count, *part.shape[1:]), dtype=narrow.dtype)
            elif kept[key].dtype != narrow.dtype:
                kept[key] = kept[key].to(torch.promote_types(kept[key].dtype, narrow.dtype))
            kept[key][_slice(experts)].copy_(narrow)


def _slice(experts: range) -> slice:
    return slice(experts.start, experts.stop)


def _warn_of_vanished(packed: PackedBytes, weights: Weights) -> None:
    """Warn about experts whose values are so small that all their packed 16-bit scales are zero."""
    opened = open_tensor(packed.data)
    if not isinstance(opened, _core.PackedTensor):
        return
    scales = opened.parameters("levels" if opened.kind == "ternary" else "scales")
    if scales.reshape(len(scales), -1).any(1).all():
        return
    values = _dequantized(packed)
    for expert in range(len(values)):
        if not values[expert].any() and weights.expert(expert).any():
            message = (
                f"tensor '{weights.sources[expert]}': the weights of expert {expert} are too small for the 16-bit "
                "scales of the format and were packed as zeros"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)


def _dequantized(packed: PackedBytes) -> Tensor:
    """Return the values of a packed tensor, float32 [experts, rows, columns]."""
    return torch.from_numpy(open_tensor(packed.data).dequantize())
