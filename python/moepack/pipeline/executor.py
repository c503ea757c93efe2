"""Where the tensors of a job are packed: in this process (`Here`), or on the machines of a cluster (`distributed`).

A job hands over its work in one order and gets the results in that order, so that it alone writes, and what it writes
does not depend on where the work was done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from moepack.calibration import LayerRun
from moepack.calibration.stage import PackedLayer, WholeTensor
from moepack.methods import PackedTensor
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.work import Packed, pack_run

__all__ = ["Executor", "Here", "Unit"]


class Unit(NamedTuple):
    """A tensor of a layer that is packed by itself, for its method looks at weights alone."""

    layer: PackedLayer
    name: str


class Executor(ABC):
    """Packs the tensors of one job; to be closed, as a context manager does."""

    def start(self, assignment: Assignment, layers: Sequence[PackedLayer], advance: Callable[[int], None]) -> None:
        """Begin a job.

        Args:
            assignment: its methods, prepared.
            layers: what is packed.
            advance: to be called with the number of weights just solved.
        """
        self.assignment, self.layers, self.advance = assignment, layers, advance

    def expect(self, units: Sequence[Unit]) -> None:  # noqa: B027 - needed only where work begins before its turn
        """Learn what `tensor` will be called with, in this order."""

    @abstractmethod
    def tensor(self, unit: Unit) -> PackedTensor:
        """Pack a tensor; errors as of `LayerPacker.pack`."""

    @abstractmethod
    def run(self, run: LayerRun, known: Packed) -> dict[str, PackedTensor]:
        """Pack the tensors of a layer that the model passes, but for those that are known; errors as of
        `LayerPacker.pack`."""

    def close(self) -> None:  # noqa: B027 - needed only where something is open
        """Drop what is unfinished."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Here(Executor):
    """This process."""

    def tensor(self, unit: Unit) -> PackedTensor:
        """See `Executor`."""
        return pack_run(WholeTensor(*unit), {}, self.assignment, self.advance)[unit.name]

    def run(self, run: LayerRun, known: Packed) -> dict[str, PackedTensor]:
        """See `Executor`."""
        return pack_run(run, known, self.assignment, self.advance)
