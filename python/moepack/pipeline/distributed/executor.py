"""Distributes the work of a job to a cluster and takes the results in order.

Twice as many tasks are submitted as can run at a time. So nodes never wait for the driver, and the number of results
waiting for their turn is small for models of any size.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moepack.calibration import LayerRun
from moepack.calibration.experts import ExpertsRun
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint
from moepack.errors import MoepackWarning
from moepack.methods import Calibrates, MeetsSize, Method, PackedBytes
from moepack.pipeline.assignment import Assignment, PlannedAssignment
from moepack.pipeline.distributed.cluster import Cluster
from moepack.pipeline.distributed.remote import Done, Found, pack_tensor, solve_group
from moepack.pipeline.executor import Executor, Unit
from moepack.pipeline.work import LayerWork, Packed, pack_run

__all__ = ["RayExecutor", "refuse"]

AHEAD = 2
"""Submitted tasks per task that can run."""


def refuse(method: Method) -> None:
    """Reject a method whose work cannot be shared.

    Raises:
        ValueError: it solves experts one after another, or on a GPU.
    """
    if isinstance(method, Calibrates) and method.sequential:
        raise ValueError(
            f"--ray cannot distribute this job: with these settings, the method {method.name} quantizes the experts "
            "of a layer one after another, because they share a bit budget; omit --ray, or use a method without "
            "calibration, codequant, or qmoe without --bits-per-weight"
        )
    if torch.device(getattr(method, "device", "cpu")).type != "cpu":
        raise ValueError("--ray shares work among CPUs: --device must be cpu")


class RayExecutor(Executor):
    """Packs tensors on a Ray cluster."""

    def __init__(self, address: str, checkpoint: Checkpoint, assignment: Assignment) -> None:
        """Connect and check that all nodes can take part; each task takes as many cores as torch has threads here.

        Raises:
            ClusterError: a node cannot take part.
            ValueError: as for `refuse`.
        """
        for method in assignment.methods:
            refuse(method)
        self._in_order = any(isinstance(each, MeetsSize) and each.depends_on_sizes for each in assignment.methods)
        self._cluster = Cluster(address, torch.get_num_threads())
        self._waiting: deque[Unit] = deque()
        self._running: dict[tuple[str, str], Any] = {}
        try:
            headers = checkpoint.shards.values()
            self._cluster.check({str(header.file.absolute()): header.stamp for header in headers})
        except BaseException:
            self.close()
            raise

    def start(
        self,
        assignment: PlannedAssignment,
        layers: Sequence[PackedLayer],
        advance: Callable[[int], None],
        spent: Mapping[str, int],
    ) -> None:
        """See `Executor`."""
        super().start(assignment, layers, advance, spent)
        self._layers = self._cluster.share({layer.name: layer for layer in layers})
        self._assignment = self._cluster.share(assignment)

    def expect(self, units: Sequence[Unit]) -> None:
        """See `Executor`."""
        self._waiting.extend(units)

    def tensor(self, unit: Unit) -> PackedBytes:
        """See `Executor`."""
        place = unit.layer.name, unit.name
        self._submit(unit.layer.name)
        packed: PackedBytes = self._result(self._running.pop(place))
        self._submit(unit.layer.name)
        self.advance(math.prod(layer_tensors(unit.layer)[unit.name].shape))
        return packed

    def _submit(self, turn: str) -> None:
        """Submit tensors that may start; if sizes of earlier layers matter, only those of the layer `turn`."""
        most = self._most
        while self._waiting and len(self._running) < most:
            layer, name = self._waiting[0]
            if self._in_order and layer.name != turn:
                return
            self._waiting.popleft()
            spent = dict(self.spent) if self._in_order else {}
            task = self._cluster.submit(pack_tensor, self._assignment, [self._layers], layer.name, name, spent)
            self._running[layer.name, name] = task

    @property
    def _most(self) -> int:
        return max(AHEAD * self._cluster.slots, 1)

    def run(self, run: LayerRun, known: Packed) -> dict[str, PackedBytes]:
        """See `Executor`. Linear layers depend on each other, and known tensors are only looked up: both stay here."""
        if not isinstance(run, ExpertsRun) or known.keys() >= run.tensors.keys():
            return pack_run(run, known, self.assignment, self.advance, self.spent)
        work = LayerWork(run, known, self.assignment, self.advance, self.spent)
        shared = [self._cluster.share((run.apart(), dict(known)))]
        tasks = ((solve_group, self._assignment, shared, group) for group in run.groups)
        for group, found in zip(run.groups, self._results(tasks), strict=True):
            for name, experts, solution in found.solved:
                work.put(name, experts, solution)
            run.add(found.additions)
            self.advance(len(group) * sum(math.prod(run.tensors[name].shape[1:]) for name in work.plans))
        run.finished = True
        return work.pack()

    def _results(self, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Found]:
        """Yield the results of tasks in order."""
        running: deque[Any] = deque()
        for task in tasks:
            running.append(self._cluster.submit(*task))
            if len(running) >= self._most:
                yield self._result(running.popleft())
        while running:
            yield self._result(running.popleft())

    def _result(self, task: Any) -> Any:
        done: Done = self._cluster.result(task)
        for message in done.warned:
            warnings.warn(message, MoepackWarning, stacklevel=2)
        return done.result

    def close(self) -> None:
        """See `Executor`."""
        self._cluster.close()
