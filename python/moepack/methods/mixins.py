"""What a method may do beyond packing each tensor, one mixin per ability.

The pipeline asks with `isinstance`, so an ability without its mixin would be ignored. `Method` therefore rejects a
class that defines a member of a mixin but does not inherit it. The mixin for comparisons is `fitting.Fitted`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.checkpoint.rewritten import Rewriting

__all__ = [
    "Calibrates",
    "Goal",
    "MeetsSize",
    "PacksLinears",
    "Rearranges",
    "Rewrites",
    "goal_of",
    "is_sized_by_plan",
    "linear_roles",
    "missing_mixin",
    "requested",
]


class Calibrates(ABC):
    """The method runs the model on a text and solves stages with their inputs."""

    @property
    @abstractmethod
    def request(self) -> CalibrationRequest | None:
        """The required calibration. None: with these settings, the method uses weights only."""


class PacksLinears(ABC):
    """The method also packs linear layers outside the experts."""

    @property
    @abstractmethod
    def dense_roles(self) -> frozenset[str]:
        """Roles of the linear layers to pack (`checkpoint.dense.ROLES`), by the settings only; others are copied."""


@dataclass(frozen=True)
class Goal:
    """A requested size.

    Attributes:
        nbytes: maximum size of all weight files in bytes.
        reason: how it was chosen, in words; "" if that needs no words.
    """

    nbytes: int
    reason: str = ""


class MeetsSize(ABC):
    """The method packs a model to a requested size."""

    sized_by_plan: ClassVar[bool] = False
    """Whether only a plan knows the sizes of tensors. A plan is then made before a job is estimated."""

    depends_on_sizes: ClassVar[bool] = False
    """Whether the packed sizes of earlier tensors (`Stage.spent`) influence later ones without calibration."""

    @abstractmethod
    def goal(self, checkpoint: Checkpoint, model: MoeModel) -> Goal | None:
        """Return the requested size of all weight files, if there is one, before any weight is read.

        Raises:
            ValueError: the requested size cannot be reached.
        """


class Rearranges(ABC):
    """The method stores the channels of experts in another order than the checkpoint, or in other tensors."""

    @abstractmethod
    def arrange(self, layer: MoeLayer) -> MoeLayer:
        """Return a sparse layer with the projections to pack; only a job's main method may rearrange them.

        Raises:
            UnsupportedModelError: the method cannot pack such a layer.
        """


class Rewrites(ABC):
    """The method changes the checkpoint before it is packed, including tensors that are not packed."""

    @property
    @abstractmethod
    def rewrites(self) -> bool:
        """Whether these settings change checkpoints; only a job's main method may."""

    @abstractmethod
    def rewrite(self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, Tensor] | None) -> Rewriting | None:
        """Change a checkpoint.

        Called once per job, before `Method.plan`, which receives the changed checkpoint.

        Args:
            checkpoint: the original.
            model: its description.
            kept: the state saved by an interrupted run. If it is reused, the result's state must be this same object.

        Returns:
            The changed checkpoint, or None to pack the original.

        Raises:
            ResumeError: `kept` is damaged.
            UnsupportedModelError: the method cannot change this model.
        """


_MIXINS = (Calibrates, PacksLinears, MeetsSize, Rearranges, Rewrites)


def missing_mixin(method: type) -> tuple[str, type] | None:
    """Return a member that a class defines without inheriting its mixin, and that mixin; None if there is none."""
    for mixin in _MIXINS:
        members = {name for name in vars(mixin) if not name.startswith("_")}
        if not issubclass(method, mixin) and (found := members & vars(method).keys()):
            return min(found), mixin
    return None


def requested(method: object) -> CalibrationRequest | None:
    """Return the calibration that a method requires, or None."""
    return method.request if isinstance(method, Calibrates) else None


def linear_roles(method: object) -> frozenset[str]:
    """Return the roles of the linear layers that a method packs."""
    return method.dense_roles if isinstance(method, PacksLinears) else frozenset()


def goal_of(method: object, checkpoint: Checkpoint, model: MoeModel) -> Goal | None:
    """Return the requested size, if there is one; raises as `MeetsSize.goal`."""
    return method.goal(checkpoint, model) if isinstance(method, MeetsSize) else None


def is_sized_by_plan(method: object) -> bool:
    """Return whether only a plan knows the sizes of a method's tensors."""
    return isinstance(method, MeetsSize) and method.sized_by_plan
