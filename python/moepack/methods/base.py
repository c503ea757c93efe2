"""The interface between a compression method and the pipeline.

A method solves the stages of a layer and packs the solutions. It opens no files and does not know where weights come
from or where packed bytes go. It keeps no state of a layer: decisions for the whole model are made in `prepare`, and
everything about a layer is in its stages.

A method is deterministic. The same weights, inputs, settings and version give the same bytes, because resumed work must
equal uninterrupted work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.calibration import CalibrationRequest, Stage
from moepack.calibration.stage import Shape, Weights
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.checkpoint.rewritten import Rewriting
from moepack.progress import Progress

__all__ = ["Expected", "LayerPlan", "Method", "PackedTensor", "Shape", "Solution", "Stage", "Weights"]


@dataclass(frozen=True)
class PackedTensor:
    """A packed projection.

    Attributes:
        kind: packed format, for example `ternary`.
        data: flat uint8 array; its length is a multiple of 64.
        details: JSON values that `inspect` shows.
    """

    kind: str
    data: npt.NDArray[np.uint8]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """The solution of a method for one tensor of a stage.

    Attributes:
        parts: tensors that `pack` stores, by name (codes, scales, ...). With calibration, a stage may hold only some of
            the experts; the first axis of each part then runs over the stage's experts.
        values: [G, R, C] float32, exactly the values of the packed tensor, which the next layer sees. None without
            calibration.
        details: details of a whole tensor for its manifest entry, in addition to those that `pack` returns.
        rounded: experts whose inputs could not be used, with the reason.
    """

    parts: Mapping[str, Tensor]
    values: Tensor | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    rounded: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The size of a packed tensor before it is packed.

    Attributes:
        nbytes: size in bytes, including all metadata.
        exact: whether shape and settings alone determine the size; otherwise it depends on the weights and is
            approximate.
    """

    nbytes: float
    exact: bool


class LayerPlan(Protocol):
    """State that a method collects about one layer before its first stage is solved."""

    def plan(self, stage: Stage) -> None:
        """Inspect a stage in advance.

        After running out of memory, the same experts are shown again in smaller groups.
        """


class Method(ABC):
    """A compression method with its settings."""

    name: ClassVar[str]
    """Name of the method on the command line."""

    packs_empty: ClassVar[bool] = False
    """Whether the method packs tensors without values, such as experts of zero width."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, as JSON values; part of the job's fingerprint."""

    @property
    def request(self) -> CalibrationRequest | None:
        """The required calibration. None: the method uses weights only and receives one whole tensor at a time."""
        return None

    @property
    def dense_roles(self) -> frozenset[str]:
        """Roles of the linear layers outside the experts to pack (`checkpoint.dense.ROLES`); the others are copied.

        The roles depend on the settings only.
        """
        return frozenset()

    @property
    def looks_ahead(self) -> bool:
        """Whether `rewrite` or `prepare` takes long because it reads the weights of the whole model."""
        return False

    @property
    def needs_balance(self) -> bool:
        """Whether the loss depends on the scales of columns, so that the balanced form of a checkpoint is packed
        (`moepack.checkpoint.balanced`)."""
        return False

    @property
    def rewrites(self) -> bool:
        """Whether `rewrite` changes checkpoints; only a job's main method may."""
        return False

    @property
    def counts_on(self) -> bool:
        """Whether the packed sizes of earlier tensors (`book`) influence those of later layers."""
        return False

    @property
    def in_turn(self) -> bool:
        """Whether the groups of experts of a layer are solved one after another because they share one bit budget."""
        return False

    def arranged(self, layer: MoeLayer) -> MoeLayer:
        """Return a sparse layer with the projections to pack; only a job's main method may rearrange them.

        Raises:
            UnsupportedModelError: the method cannot pack such a layer.
        """
        return layer

    @abstractmethod
    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the maximum packed size of a tensor in bytes; a linear layer has the shape [1, rows, columns]."""

    def expected(self, weights: Weights) -> Expected:
        """Return the size before preparation and calibration.

        If the size depends on values, one expert is packed as a sample. The default is the upper bound.
        """
        return Expected(self.bound(weights.shape, weights.role), exact=False)

    def sample(self, weights: Weights) -> PackedTensor:
        """Pack one tensor on its own; only without calibration."""
        stage = Stage(weights.name, {weights.name: weights}, range(weights.shape[0]))
        return self.pack(weights, self.solve(stage)[weights.name])

    def rewrite(self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, Tensor] | None) -> Rewriting | None:
        """Change a checkpoint, including tensors that are not packed.

        Called once per job, before `prepare`, which receives the changed checkpoint.

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
        return None

    def aim(self, checkpoint: Checkpoint, model: MoeModel) -> None:  # noqa: B027 - most methods have no target size
        """Check a checkpoint against the settings before any weight is read. Called before `prepare`.

        Raises:
            ValueError: the requested size cannot be reached.
        """

    @property
    def plans(self) -> bool:
        """Whether sizes are known only after `prepare`.

        A second call of `prepare` for the same checkpoint costs nothing.
        """
        return False

    def prepare(  # noqa: B027 - most methods prepare nothing
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None
    ) -> None:
        """Make decisions for the whole model.

        Called once per job, resumed or not, before the first stage. Must be deterministic.

        Args:
            checkpoint: the checkpoint to compress.
            model: its description.
            progress: receives progress if the work takes long.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """

    def decided(self, name: str) -> Any:
        """Return what `prepare` decided for the packed tensor `name`, as a JSON value.

        The tensor's bytes must depend only on this value, the settings and the stages.
        """
        return None

    def layer_plan(self, experts: int) -> LayerPlan | None:
        """Return an object that inspects all stages of a layer before they are solved (`Stage.plan`), or None.

        None means that stages are solved independently. `experts` is the number of experts of the layer.
        """
        return None

    @abstractmethod
    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize the tensors of a stage; return a solution for each, by its name in the stage.

        After running out of memory, the same experts are passed again in smaller groups.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """

    @abstractmethod
    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor from the solution for all its experts."""

    @property
    def budget(self) -> int | None:
        """Maximum size of all weight files in bytes if a size was requested; valid after `aim`."""
        return None

    @property
    def kernel(self) -> str | None:
        """The kind of product that sets the packed model's speed: "int" or "coded" (`moepack.backends.speeds`)."""
        return None

    @property
    def expected_loss(self) -> tuple[float, float] | None:
        """Lower and upper bound of the expected loss increase in nats per token.

        None if unknown. Valid after `prepare`.
        """
        return None

    def files(self) -> Mapping[str, bytes]:
        """Return additional small files for the packed directory, by name; valid after `prepare`."""
        return {}

    def book(self, name: str, nbytes: int) -> None:  # noqa: B027 - few methods share bytes between layers
        """Record the packed size of a tensor.

        Called for all tensors in processing order, including those that an interrupted run packed.
        """

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Return notes on a finished job for the user, as complete sentences.

        Args:
            layers: calibration results by layer: `tokens` (a list over experts) and `rounded` (experts quantized
                without their inputs, with the reason). Empty without calibration.
        """
        return ()
