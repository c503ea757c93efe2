"""Tasks that run on the nodes of a cluster: pack a tensor, or measure or solve a group of experts.

A task may run again on another node, so it modifies only its own copies. Layers and layer plans are large and serve
many tasks: a process caches the last ones that it fetched. The inputs of experts come with the task that reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moepack.arrays import in_host_memory, narrowed
from moepack.backends.threads import set_threads
from moepack.calibration.experts import ExpertsRun, Shard
from moepack.calibration.stage import PackedLayer, WholeTensor
from moepack.calibration.stream import Additions
from moepack.errors import MoepackWarning
from moepack.methods import LayerPlan, PackedBytes, Solution
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.work import LayerWork, Measured, Packed, pack_run

__all__ = ["Done", "Found", "Solved", "measure_group", "pack_tensor", "solve_group"]

LayerPlans = dict[int, LayerPlan]
"""See `LayerWork.layer_plans`."""

Solved = list[tuple[str, range, Solution, dict[str, torch.dtype]]]
"""Solutions by tensor and experts, without values, which only serve to compute the experts' outputs. Integers are in
the narrowest dtype that holds them, next to the dtypes that they had."""


class Done(NamedTuple):
    """A task's result, and the warnings that it issued."""

    result: Any
    warned: Sequence[str]


class Found(NamedTuple):
    """What a task found for a group of experts.

    Attributes:
        solved: the solutions.
        additions: additions to the sums of each stream.
        largest: the largest magnitude of activations.
        half: the largest magnitude of float16 weights, by tensor.
        taken: by layer plan, what the group took; empty if `plans` has that.
        plans: the layer plans after a group that is a wave by itself, otherwise None.
    """

    solved: Solved
    additions: Sequence[Additions]
    largest: float
    half: Mapping[str, float]
    taken: Mapping[int, Any]
    plans: LayerPlans | None


def pack_tensor(
    threads: int,
    assignment: PlannedAssignment,
    layers: Sequence[Any],
    layer: str,
    name: str,
    spent: Mapping[str, int],
) -> Done:
    """Pack a tensor whose method uses weights only; `layers` is a list of one reference, `spent` as for `Stage`."""
    run = WholeTensor(_layers(*layers)[layer], name)
    return _done(threads, lambda: pack_run(run, {}, assignment, lambda _: None, spent)[name])


def measure_group(
    threads: int,
    assignment: PlannedAssignment,
    run: Sequence[Any],
    plans: Sequence[Any],
    group: range,
    shard: Shard,
) -> Done:
    """Measure the stages of a group of experts; the run and the layer plans are given as lists of one reference."""
    work = _group(assignment, run, plans, group, shard)
    return _done(threads, lambda: _measured(work))


def _group(
    assignment: PlannedAssignment, run: Sequence[Any], plans: Sequence[Any], group: range, shard: Shard
) -> _Noting:
    apart, known = _run(*run)
    return _Noting(apart.only(group, shard), known, assignment, _plans(*plans))


@torch.no_grad()
def _measured(work: _Noting) -> list[Measured]:
    found = []
    for measured in work.measured():
        work.add([measured])  # the next stage of the first group depends on it
        found.append(measured)
    return found


def solve_group(
    threads: int,
    assignment: PlannedAssignment,
    run: Sequence[Any],
    plans: Sequence[Any],
    group: range,
    shard: Shard,
    alone: bool,
) -> Done:
    """Solve a group of experts, which is `alone` in its wave or not; other arguments as for `measure_group`."""
    work = _group(assignment, run, plans, group, shard)
    return _done(threads, lambda: _solved(work, group, alone))


@torch.no_grad()
def _solved(work: _Noting, group: range, alone: bool) -> Found:
    work.answer()
    run, plans = work.run, work.layer_plans
    assert isinstance(run, ExpertsRun)
    additions = [Additions([(rows.cpu(), states.cpu()) for rows, states in own.made]) for own in run.additions]
    half = {name: max(found, default=0.0) for name, found in work.half.items()}
    taken = {} if alone else {number: plan.taken(group) for number, plan in plans.items()}
    return Found(work.noted, additions, run.largest, half, taken, plans if alone else None)


class _Noting(LayerWork):
    """Keeps solutions group by group, for the process that combines them."""

    def __init__(self, run: ExpertsRun, known: Packed, assignment: PlannedAssignment, plans: LayerPlans) -> None:
        super().__init__(run, known, assignment, lambda _: None, {})
        self.layer_plans = plans
        self.noted: Solved = []

    def put(self, name: str, experts: range, solution: Solution) -> None:
        """Keep a solution, in CPU memory."""
        parts = {key: in_host_memory(narrowed(part)) for key, part in solution.parts.items()}
        dtypes = {key: part.dtype for key, part in solution.parts.items()}
        self.noted.append((name, experts, replace(solution, parts=parts, values=None), dtypes))


def _done(threads: int, work: Callable[[], Any]) -> Done:
    _use(threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MoepackWarning)
        result = work()
    return Done(result, [str(each.message) for each in caught if issubclass(each.category, MoepackWarning)])


_use = lru_cache(maxsize=1)(set_threads)


@lru_cache(maxsize=1)
def _layers(reference: Any) -> Mapping[str, PackedLayer]:
    layers: Mapping[str, PackedLayer] = _fetched(reference)
    return layers


@lru_cache(maxsize=1)
def _run(reference: Any) -> tuple[ExpertsRun, dict[str, PackedBytes]]:
    run, known = _fetched(reference)
    return run, known


@lru_cache(maxsize=1)
def _plans(reference: Any) -> LayerPlans:
    plans: LayerPlans = _fetched(reference)
    return plans


def _fetched(reference: Any) -> Any:
    import ray

    return ray.get(reference)
