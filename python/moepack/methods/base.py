"""What a compression method is to the pipeline.

A method solves the stages of a layer and packs what it found. It never opens a file, never learns where weights come
from or where packed bytes go, and keeps nothing of a layer: whatever it decides for the whole model it decides in
`prepare`, and everything about a layer is in the stage that it is given.

A method is deterministic: the same weights, inputs, settings and version give the same bytes, because resumed work must
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
        kind: which reader understands the bytes, for example `ternary`.
        data: flat uint8 array, its length a multiple of 64.
        details: what `inspect` shows of it, JSON values.
    """

    kind: str
    data: npt.NDArray[np.uint8]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """What a method found for one tensor of a stage.

    Attributes:
        parts: what `pack` stores, by name (codes, scales, ...). Where a stage may hold some of the experts only, with
            calibration, the first axis of each part runs over the stage's experts.
        values: [G, R, C] float32 that the packed tensor will hold, exactly: the next layer sees them. None without
            calibration.
        details: of a whole tensor, what its manifest entry tells beside the details that `pack` finds.
        rounded: experts whose inputs could not be used, with the reason.
    """

    parts: Mapping[str, Tensor]
    values: Tensor | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    rounded: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The size of a packed tensor before it is made.

    Attributes:
        nbytes: bytes, all metadata counted.
        exact: whether shape and settings alone fix it; otherwise the weights' values have a say, and it is about that.
    """

    nbytes: float
    exact: bool


class LayerPlan(Protocol):
    """What a method notes of one layer before its first stage is solved."""

    def plan(self, stage: Stage) -> None:
        """See a stage in advance; a second time for the same experts, in smaller groups, where memory ran out."""


class Method(ABC):
    """A compression method with its settings."""

    name: ClassVar[str]
    """Name of the method, as the command line spells it."""

    packs_empty: ClassVar[bool] = False
    """Whether it packs tensors without values, such as experts of no width."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes, as JSON values; part of the job's fingerprint."""

    @property
    def request(self) -> CalibrationRequest | None:
        """What the method must see of the running model. None: it looks at weights alone, and is given one whole
        tensor at a time."""
        return None

    @property
    def dense_roles(self) -> frozenset[str]:
        """Which linear layers outside the experts are packed (`checkpoint.dense.ROLES`); the others stay as they are.
        Follows from the settings."""
        return frozenset()

    @property
    def looks_ahead(self) -> bool:
        """Whether `rewrite` or `prepare` take their time, for they read the weights of the whole model."""
        return False

    @property
    def rewrites(self) -> bool:
        """Whether `rewrite` changes checkpoints; only the method of a whole job may."""
        return False

    @property
    def counts_on(self) -> bool:
        """Whether what earlier tensors took (`book`) has a say in those of later layers."""
        return False

    @property
    def in_turn(self) -> bool:
        """Whether the groups of experts of a layer are solved one after another, for they share its bits."""
        return False

    def arranged(self, layer: MoeLayer) -> MoeLayer:
        """Return a sparse layer with the projections that are packed, as they are unless the method puts them together
        otherwise; only the method of a whole job may.

        Raises:
            UnsupportedModelError: the method cannot pack such a layer.
        """
        return layer

    @abstractmethod
    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the most bytes that a tensor can take packed; a linear layer has the shape [1, rows, columns]."""

    def expected(self, weights: Weights) -> Expected:
        """Return the size before anything is prepared or calibrated; where values matter, one expert is packed to find
        out. The most that it can be if the method does not say."""
        return Expected(self.bound(weights.shape, weights.role), exact=False)

    def sample(self, weights: Weights) -> PackedTensor:
        """Pack a tensor by itself; only without calibration."""
        stage = Stage(weights.name, {weights.name: weights}, range(weights.shape[0]))
        return self.pack(weights, self.solve(stage)[weights.name])

    def rewrite(self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, Tensor] | None) -> Rewriting | None:
        """Change a checkpoint, with what will not be packed. Called once a job, before `prepare`, which sees the
        changed one.

        Args:
            checkpoint: the original.
            model: its description.
            kept: the state that an interrupted run left. Where it is used again, the result's state is this very
                object.

        Returns:
            The changed checkpoint, or None if it is to be packed as it is.

        Raises:
            ResumeError: `kept` is damaged.
            UnsupportedModelError: the model cannot be changed so.
        """
        return None

    def aim(self, checkpoint: Checkpoint, model: MoeModel) -> None:  # noqa: B027 - most methods are given no size
        """Refuse what cannot be done with a checkpoint, before a weight is read. Called before `prepare`.

        Raises:
            ValueError: the size that was asked for cannot be.
        """

    @property
    def plans(self) -> bool:
        """Whether sizes are known only after `prepare`, whose second call for a checkpoint costs nothing."""
        return False

    def prepare(  # noqa: B027 - most methods prepare nothing
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None
    ) -> None:
        """Decide what concerns the whole model. Called once a job, resumed or not, before the first stage; must come
        to the same result each time.

        Args:
            checkpoint: what is compressed.
            model: its description.
            progress: is told how far the work has come, where it takes long.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """

    def decided(self, name: str) -> Any:
        """Return what `prepare` decided for the packed tensor `name` alone, as a JSON value: with it, the bytes follow
        from the settings and from what the method is given to solve."""
        return None

    def layer_plan(self, experts: int) -> LayerPlan | None:
        """Return what is to see all stages of a layer of so many experts before they are solved, as `Stage.plan`;
        None where stages are solved one by one."""
        return None

    @abstractmethod
    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize the tensors of a stage; gives each a solution, by its name in the stage.

        Where memory runs out the same experts come again in smaller groups.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """

    @abstractmethod
    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor from the solution for all its experts."""

    @property
    def budget(self) -> int | None:
        """The most bytes that all files of weights may take, where that is known; after `aim`."""
        return None

    @property
    def kernel(self) -> str | None:
        """The products that tell the speed of the packed model: "int" or "coded" (`moepack.runtime.speeds`)."""
        return None

    @property
    def expected_loss(self) -> tuple[float, float] | None:
        """The least and the most nats a token that a model is expected to lose; None if nothing was measured that
        tells. After `prepare`."""
        return None

    def files(self) -> Mapping[str, bytes]:
        """Return small files that belong beside the weights, by name; after `prepare`."""
        return {}

    def book(self, name: str, nbytes: int) -> None:  # noqa: B027 - few methods share bytes between layers
        """Learn what a packed tensor takes. Called for all tensors in the order of work, also for those that an
        interrupted run packed."""

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Return what the user should know of a finished job, in full sentences.

        Args:
            layers: by layer, what calibration saw: `tokens` (a list over experts) and `rounded` (experts without use of
                their inputs, with the reason). Empty without calibration.
        """
        return ()
