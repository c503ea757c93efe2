"""What a compression method is to the pipeline.

A method turns the expert weights of one layer into packed tensors. It never opens a file and never learns where weights
come from or where packed bytes go; the pipeline feeds it a layer at a time, so it must not keep a layer's weights.

A method is deterministic: the same weights, settings and version give the same bytes whatever the number of threads,
because resumed work must equal uninterrupted work.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel

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
    """

    name: str
    shape: Shape
    expert: Callable[[int], torch.Tensor]
    sources: tuple[str, ...]


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
class CalibratedMethod(Method, Protocol):
    """A method that watches the model run. The pipeline gives it every layer in the order of execution.

    Its `settings` are complete, and identify the calibration set, once `begin` has returned.
    """

    def begin(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Prepare to run the model of `checkpoint`. Called once a job, before anything else.

        Raises:
            CalibrationError: the calibration set is unusable.
        """
        ...

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
