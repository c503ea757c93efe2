"""The interface that packs the tensors of a model after their bytes are allocated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from moepack.methods.base import Packer, Shape
from moepack.methods.rate.coder import bound

__all__ = ["Allocated"]


class Allocated(Packer):
    """Packs the tensors of a model whose bytes are allocated.

    Attributes:
        loss: expected loss increase in nats per token.
        errors: loss increase in nats per token by role, if its tensors were rounded to nearest and the loss were
            quadratic.
    """

    errors: Mapping[str, float]
    loss: float

    @property
    @abstractmethod
    def decisions(self) -> Mapping[str, Any]:
        """The decision for each tensor as a JSON value, by name."""

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the packed size in bytes if every weight were an exception."""
        return bound(shape)
