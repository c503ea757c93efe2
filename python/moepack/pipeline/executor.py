"""Where the tensors of a job are packed: in this process (`Here`), or on the machines of a cluster (`distributed`).

A job submits work and receives results in one fixed order, and only the job writes files. So the output does not depend
on where the work ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import ClassVar, NamedTuple

from moepack.calibration import LayerRun
from moepack.calibration.stage import PackedLayer, WholeTensor
from moepack.methods import PackedBytes
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.work import Packed, pack_run

__all__ = ["Executor", "Here", "Unit"]


class Unit(NamedTuple):
    """A tensor of a layer that is packed independently because its method uses weights only."""

    layer: PackedLayer
    name: str


class Executor(ABC):
    """Packs the tensors of one job. Close it after use, or use it as a context manager.

    Attributes:
        reads_here: whether this machine reads all weights to pack.
    """

    reads_here: ClassVar[bool] = True

    def start(
        self,
        assignment: PlannedAssignment,
        layers: Sequence[PackedLayer],
        advance: Callable[[int], None],
        spent: Mapping[str, int],
    ) -> None:
        """Start a job.

        Args:
            assignment: the plans of the job's methods.
            layers: the layers to pack.
            advance: callback that receives the number of weights just solved.
            spent: see `Stage.spent`; grows while the job runs.
        """
        self.assignment, self.layers, self.advance, self.spent = assignment, layers, advance, spent

    def expect(self, units: Sequence[Unit]) -> None:  # noqa: B027 - needed only if work starts early
        """Announce the units that `tensor` will be called with, in order."""

    @abstractmethod
    def tensor(self, unit: Unit) -> PackedBytes:
        """Pack a tensor; raises as `LayerPacker.pack`."""

    @abstractmethod
    def run(self, run: LayerRun, known: Packed) -> dict[str, PackedBytes]:
        """Pack the tensors of a layer while the model runs it, except those in `known`.

        Raises as `LayerPacker.pack`.
        """

    def close(self) -> None:  # noqa: B027 - needed only if resources are open
        """Discard unfinished work."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Here(Executor):
    """Packs tensors in this process."""

    def tensor(self, unit: Unit) -> PackedBytes:
        """See `Executor`."""
        return pack_run(WholeTensor(*unit), {}, self.assignment, self.advance, self.spent)[unit.name]

    def run(self, run: LayerRun, known: Packed) -> dict[str, PackedBytes]:
        """See `Executor`."""
        return pack_run(run, known, self.assignment, self.advance, self.spent)
