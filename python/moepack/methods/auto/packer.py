"""What packs the tensors of a model once their bytes were shared out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from moepack.calibration import Stage
from moepack.methods.base import Expected, PackedTensor, Solution, Weights
from moepack.methods.rate.layer import LayerSolver

__all__ = ["Packer"]


class Packer(ABC):
    """A decided packing of a whole model; methods as those of `moepack.methods.base.Method`.

    Attributes:
        loss: nats a token that are expected to be lost.
        errors: by role, nats a token that rounding its tensors to nearest would cost, were the loss a parabola.
    """

    errors: Mapping[str, float]
    loss: float

    @abstractmethod
    def expected(self, weights: Weights) -> Expected:
        """The size of a tensor."""

    @abstractmethod
    def decision(self, name: str) -> Any:
        """What was decided for a tensor, as a JSON value."""

    @abstractmethod
    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize the tensors of a stage."""

    @abstractmethod
    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor."""

    def layer_solver(self) -> LayerSolver | None:
        """What solves the stages of a layer, if they depend on each other."""
        return None

    def book(self, name: str, nbytes: int) -> None:
        """A tensor took so many bytes."""
        return None
