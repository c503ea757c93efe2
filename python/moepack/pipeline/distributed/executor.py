"""Distributes the work of a job to a cluster and takes the results in order.

Twice as many tasks are submitted as can run at a time. So nodes never wait for the driver, and the number of results
waiting for their turn is small for models of any size.

If the experts of a layer share a bit budget (`LayerPlan`), tasks first measure all groups of experts, which gives the
price of a bit. The groups of one wave then pay one price, and the next wave corrects for what they took. A run on one
machine solves the same waves in the same order.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from moepack.calibration import LayerRun
from moepack.calibration.experts import ExpertsRun
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint
from moepack.errors import DeviceError, MoepackWarning
from moepack.methods import MeetsSize, Method, PackedBytes
from moepack.methods.mixins import requested
from moepack.pipeline.assignment import Assignment, PlannedAssignment
from moepack.pipeline.distributed.cluster import Cluster
from moepack.pipeline.distributed.remote import Done, Found, measure_group, pack_tensor, solve_group
from moepack.pipeline.executor import Executor, Unit
from moepack.pipeline.work import LayerWork, Packed, pack_run

__all__ = ["RayExecutor", "refuse"]

AHEAD = 2
"""Submitted tasks per task that can run."""


def refuse(method: Method) -> None:
    """Reject a method whose device a cluster cannot provide.

    Raises:
        DeviceError: this machine has no GPU, although it runs the model's other layers on one.
        ValueError: the device is neither the CPU nor any GPU.
    """
    device = device_of(method)
    if str(device) not in ("cpu", "cuda"):
        raise ValueError(f"--ray assigns a GPU to each task: --device must be cpu or cuda, not {device}")
    if device.type == "cuda" and requested(method) is not None and not torch.cuda.is_available():
        raise DeviceError(
            f"--ray with --device cuda and a text: the layers outside the experts run on a GPU of this machine, which "
            f"has none; run the command on a node with a GPU, or {method.name} without a text"
        )


def device_of(method: Method) -> torch.device:
    """Return the device that a method computes on."""
    return torch.device(getattr(method, "device", "cpu"))


class RayExecutor(Executor):
    """Packs tensors on a Ray cluster."""

    reads_here: ClassVar[bool] = False

    def __init__(self, address: str, checkpoint: Checkpoint, assignment: Assignment) -> None:
        """Connect and check that all nodes can take part.

        Each task takes as many cores as torch has threads here, and one GPU if a method computes on GPUs.

        Raises:
            ClusterError: a node cannot take part.
            DeviceError, ValueError: as for `refuse`.
        """
        for method in assignment.methods:
            refuse(method)
        self._in_order = any(isinstance(each, MeetsSize) and each.depends_on_sizes for each in assignment.methods)
        gpus = int(any(device_of(method).type == "cuda" for method in assignment.methods))
        self._cluster = Cluster(address, torch.get_num_threads(), gpus)
        self._waiting: deque[Unit] = deque()
        self._running: dict[tuple[str, str], Any] = {}
        try:
            headers = checkpoint.shards.values() if checkpoint.files.is_local else ()
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
        shared = [self._cluster.share((run.apart(), dict(known)))]
        work = LayerWork(run, known, self.assignment, self.advance, self.spent)
        work.create_plans()
        jobs: Iterator[tuple[Any, ...]]
        for wave in (run.groups[:1], run.groups[1:]) if work.layer_plans else ():
            plans = self._shared_plans(work)
            jobs = ((measure_group, self._assignment, shared, plans, group, run.shard(group)) for group in wave)
            for measured in self._results(jobs):
                work.add(measured)
        for groups in run.waves:
            work.begin(groups)
            plans, alone = self._shared_plans(work), len(groups) == 1
            jobs = ((solve_group, self._assignment, shared, plans, group, run.shard(group), alone) for group in groups)
            for group, found in zip(groups, self._results(jobs), strict=True):
                self._take(work, run, group, found)
        run.finished = True
        return work.pack()

    def _shared_plans(self, work: LayerWork) -> list[Any]:
        """Put copies of the layer plans into the object store; returns a list of their reference."""
        names = {weights.name for weights in work.run.tensors.values()}
        return [self._cluster.share({number: plan.apart(names) for number, plan in work.layer_plans.items()})]

    def _take(self, work: LayerWork, run: ExpertsRun, group: range, found: Found) -> None:
        """Take over the result of a group."""
        for name, experts, solution, dtypes in found.solved:
            parts = {key: part.to(dtypes[key]) for key, part in solution.parts.items()}
            work.put(name, experts, replace(solution, parts=parts))
        for name, largest in found.half.items():
            work.half[name].append(largest)
        if found.plans is not None:
            work.layer_plans = found.plans
        for number, taken in found.taken.items():
            work.layer_plans[number].take(group, taken)
        run.add(found.additions, found.largest)
        self.advance(len(group) * sum(math.prod(run.tensors[name].shape[1:]) for name in work.plans))

    def _results(self, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
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
