"""Methods that can be given a size, for comparisons of methods at equal sizes (`moepack compare`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.base import Method, Shape
from moepack.methods.files import kept_bytes

__all__ = ["DENSE", "Fitted", "Wanted"]

DENSE = ("attention", "shared", "mlp")
"""Roles that all methods except `auto` and `rate` pack, with 8 bits if bits are given."""


@dataclass(frozen=True)
class Wanted:
    """A target size.

    Attributes:
        checkpoint, model: the model to compress.
        size: bytes of all weight files.
        text: settings of the calibration; empty without calibration.
    """

    checkpoint: Checkpoint
    model: MoeModel
    size: int
    text: dict[str, Any]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the packed tensors of experts, by name."""
        return {part.packed_name: part.shape for layer in self.model.layers for part in layer.projections}

    def bits(self, roles: tuple[str, ...], dense_bits: float = 0.0) -> float:
        """Return bits per weight of the experts and `roles`, or of the experts alone if `roles` take `dense_bits`."""
        experts = self.shapes
        linears = [linear for dense in self.model.dense for linear in dense.linears if linear.role in roles]
        packed = experts.keys() | {linear.source for linear in linears}
        room = 8 * (self.size - kept_bytes(self.checkpoint, self.model, packed))
        weights, dense = sum(map(math.prod, experts.values())), sum(math.prod(linear.shape) for linear in linears)
        return room / (weights + dense) if not dense_bits else (room - dense_bits * dense) / weights


class Fitted(ABC):
    """A mixin for methods that can choose their settings by a size."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fitted(cls, wanted: Wanted) -> Method:
        """Return the method with settings that meet a size, or come as close below it as they can.

        Raises:
            ValueError: it cannot reach that size.
        """

    @classmethod
    def fittings(cls) -> Mapping[str, Callable[[Wanted], Method]]:
        """Return the variants to compare, by name."""
        return {cls.name: cls.fitted}
