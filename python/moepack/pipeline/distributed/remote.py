"""Tasks that run on the nodes of a cluster: pack a tensor, or solve a group of experts.

A task may run again on another node, so it modifies only its own copies. Layers and the inputs of a layer's experts are
large and serve many tasks: a process caches the last ones that it fetched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moepack.backends.threads import set_threads
from moepack.calibration.experts import ExpertsRun
from moepack.calibration.stage import PackedLayer, WholeTensor
from moepack.calibration.stream import Additions
from moepack.errors import MoepackWarning
from moepack.methods import PackedBytes, Solution
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.work import LayerWork, Packed, pack_run

__all__ = ["Done", "Found", "Solved", "pack_tensor", "solve_group"]

Solved = list[tuple[str, range, Solution]]
"""Solutions by tensor and experts, without values, which only serve to compute the experts' outputs."""


class Done(NamedTuple):
    """A task's result, and the warnings that it issued."""

    result: Any
    warned: Sequence[str]


class Found(NamedTuple):
    """Solutions for a group of experts, and their additions to the sums of each stream."""

    solved: Solved
    additions: Sequence[Additions]


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


def solve_group(threads: int, assignment: PlannedAssignment, run: Sequence[Any], group: range) -> Done:
    """Solve a group of experts of a run, given as a list of one reference."""
    apart, known = _run(*run)
    return _done(threads, lambda: _solved(apart.only(group), known, assignment))


@torch.no_grad()
def _solved(run: ExpertsRun, known: Packed, assignment: PlannedAssignment) -> Found:
    work = _Noting(run, known, assignment, lambda _: None, {})
    work.answer()
    return Found(work.noted, run.additions)


class _Noting(LayerWork):
    """Keeps solutions group by group, for the process that combines them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noted: Solved = []

    def put(self, name: str, experts: range, solution: Solution) -> None:
        """Keep a solution."""
        self.noted.append((name, experts, replace(solution, values=None)))


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


def _fetched(reference: Any) -> Any:
    import ray

    return ray.get(reference)
