"""The interface between a compression method and the pipeline.

A method makes a plan for a model: all decisions that concern the whole model, and a packer that solves the stages of a
layer and packs the solutions. Neither opens files or knows where weights come from or where packed bytes go. Neither
keeps state: everything about a layer is in its stages.

A method is deterministic. The same weights, inputs, settings and version give the same bytes, because resumed work must
equal uninterrupted work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.calibration import CalibrationRequest, Stage
from moepack.calibration.stage import Shape, Weights
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.mixins import Goal, missing_mixin, requested
from moepack.methods.overrides import Overrides
from moepack.methods.preference import Preference
from moepack.methods.settings import Settings
from moepack.progress import Progress

__all__ = [
    "Expected",
    "LayerPlan",
    "Method",
    "MethodPlan",
    "PackedBytes",
    "Packer",
    "Pinned",
    "Shape",
    "SimpleMethod",
    "Solution",
    "Stage",
    "Weights",
]


@dataclass(frozen=True)
class PackedBytes:
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
    """What the groups of experts of one layer share, such as a bit budget.

    All stages of a layer are measured before the first is solved. Groups are then solved in waves (`LayerRun.waves`).
    Groups of the same wave do not depend on each other, so each may be solved in another process, on a copy (`apart`)
    from the beginning of the wave.
    """

    def measure(self, stage: Stage) -> Any:
        """Measure a stage before any is solved; changes nothing.

        After running out of memory, the same experts are measured again in smaller groups.
        """

    def add(self, measured: Any) -> None:
        """Add a result of `measure`. Later ones may depend on those of the first group, which is measured first."""

    def begin(self, wave: Sequence[range]) -> None:
        """Begin a wave of groups."""

    def apart(self, names: Collection[str]) -> LayerPlan:
        """Return a copy to send to another process, with the data of this layer's tensors `names` only."""

    def taken(self, group: range) -> Any:
        """Return what a solved group took from what the groups share."""

    def take(self, group: range, taken: Any) -> None:
        """Account for a group that a copy solved, given the copy's `taken`."""


class Packer(ABC):
    """Solves and packs the tensors of one model. Its decisions are made; it keeps no state of a layer or a job."""

    @abstractmethod
    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the maximum packed size of a tensor in bytes; a linear layer has the shape [1, rows, columns]."""

    @abstractmethod
    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Quantize the tensors of a stage; return a solution for each, by its name in the stage.

        After running out of memory, the same experts are passed again in smaller groups.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """

    @abstractmethod
    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack a tensor from the solution for all its experts."""

    def expected(self, weights: Weights) -> Expected:
        """Return the size of a tensor before it is solved. The default is the upper bound.

        If the size depends on values, one expert is packed as a sample.
        """
        return Expected(self.bound(weights.shape, weights.role), exact=False)

    def sample(self, weights: Weights) -> PackedBytes:
        """Pack one tensor on its own; only without calibration."""
        stage = Stage(weights.name, {weights.name: weights}, range(weights.shape[0]))
        return self.pack(weights, self.solve(stage)[weights.name])

    def layer_plan(self, experts: int, spent: Mapping[str, int]) -> LayerPlan | None:
        """Return what the experts of a layer share (`Stage.plan`), or None if groups are solved independently.

        Args:
            experts: number of experts of the layer.
            spent: see `Stage.spent`.
        """
        return None

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Return notes on a finished job for the user, as complete sentences.

        Args:
            layers: calibration results by layer: `tokens` (a list over experts) and `rounded` (experts quantized
                without their inputs, with the reason). Empty before the job and without calibration.
        """
        return ()


@dataclass(frozen=True)
class MethodPlan:
    """What a method decided for one model. Plans are values: running a job does not change them.

    Attributes:
        method: the method that decided.
        packer: solves and packs the tensors by these decisions.
        source: fingerprint of the checkpoint that the plan was made for.
        settings: all settings that determine the output, as JSON values; part of the job's fingerprint.
        request: the required calibration; None: each tensor is packed from its weights alone.
        decisions: what was decided for packed tensors, by name, as JSON values. A tensor's bytes depend only on this
            value, the settings and the stages.
        goal: the requested size, if there is one.
        loss: lower and upper bound of the expected loss increase in nats per token; None if unknown.
        token_seconds: expected time of a decoding step of one sequence on the target machine; None if unknown.
        preferences: what each preference between loss and speed gives at this size; empty if the method has none.
        machine: the target machine of these times.
        notes: notes for the user, as complete sentences.
        files: additional small files for the packed directory, by name.
    """

    method: Method
    packer: Packer
    source: str
    settings: Mapping[str, Any]
    request: CalibrationRequest | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    goal: Goal | None = None
    loss: tuple[float, float] | None = None
    token_seconds: float | None = None
    preferences: tuple[Preference, ...] = ()
    machine: str = ""
    notes: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Pinned:
    """What bits by name decide for a model (`moepack.methods.pinned`).

    Attributes:
        methods: the method of each tensor whose bits are given, by name; none if the main method gives it its bits.
        unpacked: names of the tensors that stay unpacked.
        bits: the bits of each tensor whose matrices have the same, by name.
    """

    methods: Mapping[str, Method] = field(default_factory=dict)
    unpacked: frozenset[str] = frozenset()
    bits: Mapping[str, float] = field(default_factory=dict)


class Method(Settings, ABC):
    """A compression method with its settings, a dataclass (see `moepack.methods.settings`).

    A method that decides nothing in advance is a `SimpleMethod` and has three members: `bound`, `solve` and `pack`. A
    method with decisions has `bound` and its own `plan`. All others here are optional, and abilities beyond packing
    each tensor are the mixins of `moepack.methods.mixins`.

    Attributes:
        overrides: bits by name, which `create` sets.
        pinned: what they decide for a model; None until `moepack.methods.pinned.pinned` resolves them.
    """

    overrides = Overrides()
    pinned: Pinned | None = None

    def __init_subclass__(cls) -> None:
        """Reject a class that has a member of a mixin which it does not inherit: the pipeline would ignore it."""
        super().__init_subclass__()
        if missing := missing_mixin(cls):
            raise TypeError(f"{cls.__name__} defines {missing[0]}, so it must inherit {missing[1].__name__}")

    @property
    def packs_empty(self) -> bool:
        """Whether the method packs tensors without values, such as experts of zero width."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """Whether `plan` or `Rewrites.rewrite` takes long because it reads the weights of the whole model."""
        return False

    @property
    def needs_balance(self) -> bool:
        """Whether the loss depends on the scales of columns, so that the balanced form of a checkpoint is packed
        (`moepack.checkpoint.balanced`)."""
        return False

    @property
    def kernel(self) -> str | None:
        """The kind of product that sets the packed model's speed: "int" or "coded" (`moepack.backends.speeds`)."""
        return None

    @abstractmethod
    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the maximum packed size of a tensor in bytes before a plan is made; see `Packer.bound`."""

    def expected(self, weights: Weights) -> Expected:
        """Return the size of a tensor before a plan is made; see `Packer.expected`."""
        return Expected(self.bound(weights.shape, weights.role), exact=False)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Return notes before a plan is made, as complete sentences; see `Packer.notes`."""
        return ()

    def check(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Check a checkpoint against the settings before any weight is read.

        Raises:
            UnsupportedModelError: the method cannot pack this model.
        """

    @abstractmethod
    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Make all decisions for a model. Changes nothing in the method, and is deterministic.

        Args:
            checkpoint: the checkpoint to compress.
            model: its description.
            progress: receives progress if the work takes long.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
            ValueError: the requested size cannot be reached.
        """


class SimpleMethod(Packer, Method):
    """A method that decides nothing about the whole model: it is its own packer."""

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Return a plan without decisions."""
        return MethodPlan(self, self, checkpoint.fingerprint(), self.settings, requested(self))
