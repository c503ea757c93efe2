"""The interface that packs the tensors of a model after their bytes are allocated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from moepack.calibration import Stage
from moepack.methods.base import Expected, PackedTensor, Solution, Weights
from moepack.methods.rate.layer import LayerSolver

__all__ = ["Packer"]


class Packer(ABC):
    """A packing plan for a whole model. The methods correspond to those of `moepack.methods.base.Method`.

    Attributes:
        loss: expected loss increase in nats per token.
        errors: loss increase in nats per token by role, if its tensors were rounded to nearest and the loss were
            quadratic.
    """

    errors: Mapping[str, float]
    loss: float

    @abstractmethod
    def expected(self, weights: Weights) -> Expected:
        """Return the expected size of a tensor."""

    @abstractmethod
    def decision(self, name: str) -> Any:
        """Return the decision for a tensor as a JSON value."""

    @abstractmethod
    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize the tensors of a stage."""

    @abstractmethod
    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor."""

    def layer_solver(self) -> LayerSolver | None:
        """Return the solver of a layer whose stages depend on each other; otherwise None."""
        return None

    def book(self, name: str, nbytes: int) -> None:
        """Record the packed size of a tensor in bytes."""
        return None
