"""The compressor's view of a Mixture-of-Experts model: layers of stacked projections, and all other tensors.

These values name tensors and hold none. The unit of compression is one projection of one layer: `E` experts, each a
matrix of `R` outputs by `C` inputs, independent of the checkpoint's layout (one tensor per expert, or one tensor that
stacks them and may also join gate and up).

Invariants: `MoeModel.dense_names` and the sources of all projections partition the checkpoint's tensors, except for
matrices that the model never reads; the experts of a projection have equal shapes; layers are in the order of
execution.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from moepack.checkpoint.dense import DenseLayer
from moepack.checkpoint.reader import Checkpoint

__all__ = ["MoeLayer", "MoeModel", "Part", "Projection"]


@dataclass(frozen=True, slots=True)
class Part:
    """The place of one expert's matrix.

    Attributes:
        tensor: name of the checkpoint's tensor.
        index: index of the matrix in the tensor: empty if the tensor is the matrix, the expert's number in a stacked
            tensor, and slices if it shares the tensor with another matrix (gate and up).
        transposed: whether inputs come before outputs.
    """

    tensor: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the matrix in the checkpoint's tensor, shape (R, C)."""
        matrix = tensor[self.index]
        return matrix.mT if self.transposed else matrix

    def split(self) -> tuple[int | None, "Part"]:
        """Return the number of the stored matrix in a stack, if the tensor is one, and the place in that matrix."""
        first, *rest = self.index or (None,)
        return (first, replace(self, index=tuple(rest))) if isinstance(first, int) else (None, self)


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer.

    Attributes:
        name: "gate_proj", "up_proj" or "down_proj"; "wi" or "wo" in SwitchTransformers.
        shape: (experts, output rows, input columns).
        packed_name: name of the packed tensor in a packed directory.
        parts: place of each expert's matrix.
        checkpoint: the checkpoint with the tensors.
    """

    name: str
    shape: tuple[int, int, int]
    packed_name: str
    parts: tuple[Part, ...]
    checkpoint: Checkpoint

    def expert(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the matrix of one expert, shape (R, C), in the checkpoint's dtype, as `Checkpoint.matrix`.

        Raises:
            CheckpointError: the file changed after the checkpoint was opened.
        """
        return self.checkpoint.matrix(self.parts[index], device)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's tensors of this projection, without duplicates (gate and up may share one)."""
        return tuple(dict.fromkeys(part.tensor for part in self.parts))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices that `expert` returns."""
        return self.checkpoint.info(self.parts[0].tensor).dtype

    @cached_property
    def nbytes(self) -> int:
        """Size of all experts in the checkpoint, in bytes."""
        matrix = self.shape[1] * self.shape[2]
        weights = sum(prod(self.checkpoint.info(source).shape) for source in self.sources)
        stored = sum(map(self.checkpoint.stored_bytes, self.sources))
        return matrix * self.shape[0] * stored // max(weights, 1)


@dataclass(frozen=True)
class MoeLayer:
    """One sparse layer.

    Attributes:
        name: path of the experts module in transformers' model, such as `model.layers.0.mlp.experts`.
        projections: the projections to compress, in the order of computation.
        router: names of the router's tensors in the checkpoint.
        shared: names of the tensors of the shared experts and their gate in the checkpoint.
        kind: what an expert computes: "gated" (down(act(gate x) * up x)), "plain" (down(act(up x))), or another kind
            of `checkpoint.experts.ExpertsForm`.
    """

    name: str
    projections: tuple[Projection, ...]
    router: tuple[str, ...]
    shared: tuple[str, ...]
    kind: str = "gated"

    @property
    def experts(self) -> int:
        """Number of routed experts."""
        return self.projections[0].shape[0]


@dataclass(frozen=True)
class MoeModel:
    """A described checkpoint.

    Attributes:
        architecture: transformers' model type.
        layers: the sparse layers.
        dense_names: every tensor that belongs to no projection, in the checkpoint's order.
        notes: notes for the user, in full sentences.
        dense: the linear layers outside the experts, by block. Their tensors are in `dense_names`; the method decides
            whether to pack them.
        beyond: experts of layers that transformers' model does not have (`checkpoint.beyond`). Their tensors are in
            `dense_names`; they are packed on request.
        unread: tensors that the model does not have (`checkpoint.unread`), including those of `beyond`. They are in
            `dense_names`.
    """

    architecture: str
    layers: tuple[MoeLayer, ...]
    dense_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    dense: tuple[DenseLayer, ...] = ()
    beyond: tuple[MoeLayer, ...] = ()
    unread: tuple[str, ...] = ()
