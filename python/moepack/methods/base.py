"""What a compression method is to the pipeline.

A method turns the expert weights of one layer into packed tensors; a `DenseMethod` packs linear layers outside the
experts as well. It never opens a file and never learns where weights
come from or where packed bytes go; the pipeline feeds it a layer at a time, so it must not keep a layer's weights.

A method is deterministic: the same weights, settings and version give the same bytes whatever the number of threads,
because resumed work must equal uninterrupted work.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint import Checkpoint, DenseLayer, MoeLayer, MoeModel
from moepack.checkpoint.rewritten import Rewriting

Shape = tuple[int, int, int]
"""Shape of a projection: experts, rows (outputs), columns (inputs)."""


@dataclass(frozen=True)
class Weights:
    """The weights of one projection of a layer, lazily.

    Attributes:
        name: name that the packed tensor will have; errors name it.
        shape: experts, rows, columns.
        expert: gives expert i's weights, [rows, columns], in the checkpoint's dtype. Fetch one at a time.
        sources: for each expert, the checkpoint's tensor that holds it; errors about its values name that.
        role: "experts", or what a linear layer outside the experts is: "attention", "shared", "mlp" or "head". Such a
            layer is one matrix: its shape is [1, rows, columns], and its blob has two axes.
    """

    name: str
    shape: Shape
    expert: Callable[[int], torch.Tensor]
    sources: tuple[str, ...]
    role: str = "experts"

    @property
    def ndim(self) -> int:
        """Axes of the blob: 3 for experts, 2 for a linear layer."""
        return 3 if self.role == "experts" else 2

    def one_expert(self) -> "Weights":
        """The first expert alone, for a look at what a method makes of such weights."""
        return replace(self, shape=(1, *self.shape[1:]), sources=self.sources[:1])


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
class Expected:
    """The size of a packed tensor before it is made.

    Attributes:
        nbytes: bytes, all metadata counted.
        exact: whether shape and settings alone fix it; otherwise the weights' values have a say, and it is about that.
    """

    nbytes: float
    exact: bool


class Method(Protocol):
    """A compression method with its settings."""

    @property
    def name(self) -> str:
        """Name of the method, as the command line spells it."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes, as JSON values; part of the job's fingerprint."""
        ...

    def bound(self, shape: Shape) -> int:
        """Return the most bytes that a projection of that shape can take packed."""
        ...

    def compress_layer(
        self, layer: Mapping[str, Weights], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, PackedTensor]]:
        """Compress one layer.

        Args:
            layer: the projections by name (`gate_proj`, `up_proj`, `down_proj`, or `wi`, `wo`).
            advance: to be called with the number of weights just done, at least once an expert.

        Yields:
            Each projection's name and packed tensor, every projection once.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """
        ...


@runtime_checkable
class SizedMethod(Method, Protocol):
    """A method that can say what a tensor will take before any of it is packed or calibrated."""

    def expected(self, weights: Weights) -> Expected:
        """Return the size of a projection or linear layer; where values matter, one expert is packed to find out."""
        ...


@runtime_checkable
class DenseMethod(Method, Protocol):
    """A method that packs linear layers outside the experts too.

    The pipeline gives it the linear layers of a block of the model together, before the experts of that block.
    """

    @property
    def dense_roles(self) -> frozenset[str]:
        """Which linear layers are packed (`checkpoint.dense.ROLES`); the others stay as they are. Follows from the
        settings."""
        ...

    def dense_bound(self, shape: Shape, role: str) -> int:
        """Return the most bytes that a linear layer of that shape, [1, rows, columns], can take packed."""
        ...

    def compress_dense(
        self, layer: Mapping[str, Weights], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, PackedTensor]]:
        """Compress the linear layers of one block.

        Args:
            layer: the weights by the path of the linear layer in transformers' model, such as
                `model.layers.0.self_attn.q_proj`; their roles are among `dense_roles`.
            advance: as for `compress_layer`.

        Yields:
            Each path and packed matrix, every linear layer once.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """
        ...


@runtime_checkable
class PlannedMethod(Method, Protocol):
    """A method that looks at the whole checkpoint before it packs the first layer."""

    def begin(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Prepare. Called once a job, resumed or not, before anything else; must come to the same plan each time.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
        """
        ...


@runtime_checkable
class RewritingMethod(Method, Protocol):
    """A method that changes what it does not pack, too."""

    def rewrite(
        self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, torch.Tensor] | None
    ) -> Rewriting | None:
        """Change a checkpoint. Called once a job, before `begin`, which sees the changed one.

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
        ...


@runtime_checkable
class CalibratedMethod(PlannedMethod, Protocol):
    """A method that watches the model run. The pipeline gives it every layer in the order of execution.

    Its `settings` are complete, and identify the calibration set, once `begin` has returned; `begin` raises
    CalibrationError where the calibration set is unusable.
    """

    def restore(self, layer: MoeLayer, packed: Mapping[str, PackedTensor]) -> None:
        """Take notice of the next layer, which an earlier run of the job packed.

        Args:
            layer: the layer.
            packed: its packed projections by name; the arrays are mapped and read-only.
        """
        ...

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Return what the user should know of a finished job, in full sentences.

        Args:
            layers: by layer, the details of its first projection.
        """
        ...


@runtime_checkable
class CalibratedDenseMethod(CalibratedMethod, DenseMethod, Protocol):
    """A method that watches the model run and packs linear layers too."""

    def restore_dense(self, layer: DenseLayer, packed: Mapping[str, PackedTensor]) -> None:
        """Take notice of the linear layers of the next block, which an earlier run of the job packed.

        Args:
            layer: the linear layers that were packed.
            packed: the packed tensors by path; the arrays are mapped and read-only.
        """
        ...
