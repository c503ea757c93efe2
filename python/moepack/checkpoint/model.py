"""A Mixture-of-Experts model as the compressor sees it: layers of stacked projections, and everything else.

These values name tensors; they hold none. One projection of one layer is the unit of compression: `E` experts, each a
matrix of `R` outputs by `C` inputs, whatever the checkpoint's layout (a tensor for each expert, or one tensor that
stacks them and may also join gate and up).

Invariants: `MoeModel.dense_names` and the sources of all projections partition the checkpoint's tensors, but for
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
    """Where one expert's matrix lies.

    Attributes:
        tensor: name of the checkpoint's tensor.
        index: what of it: nothing where the tensor is the matrix, the expert's number in a stacked tensor, and slices
            where it shares rows or columns with another matrix (gate and up).
        transposed: whether inputs come before outputs.
    """

    tensor: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix `[R, C]` in the checkpoint's tensor; nothing is copied."""
        matrix = tensor[self.index]
        return matrix.mT if self.transposed else matrix


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer.

    Attributes:
        name: "gate_proj", "up_proj" or "down_proj"; "wi" or "wo" in SwitchTransformers.
        shape: experts, output rows, input columns.
        packed_name: name of the packed tensor in a packed directory.
        parts: where each expert's matrix lies.
        checkpoint: the checkpoint that holds them.
    """

    name: str
    shape: tuple[int, int, int]
    packed_name: str
    parts: tuple[Part, ...]
    checkpoint: Checkpoint

    def expert(self, index: int) -> torch.Tensor:
        """The matrix of one expert, `[R, C]`, in the checkpoint's dtype, mapped and not read.

        Raises:
            CheckpointError: the file changed since the checkpoint was opened.
        """
        part = self.parts[index]
        first, *rest = part.index or (None,)
        if not isinstance(first, int):
            return part.of(self.checkpoint.tensor(part.tensor))
        return replace(part, index=tuple(rest)).of(self.checkpoint.part(part.tensor, first))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's tensors that this projection consumes, without repetition (gate and up may share one)."""
        return tuple(dict.fromkeys(part.tensor for part in self.parts))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices that `expert` returns."""
        return self.checkpoint.info(self.parts[0].tensor).dtype

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of all experts as the checkpoint stores them."""
        matrix = self.shape[1] * self.shape[2]
        weights = sum(prod(self.checkpoint.info(source).shape) for source in self.sources)
        stored = sum(map(self.checkpoint.stored_bytes, self.sources))
        return matrix * self.shape[0] * stored // max(weights, 1)


@dataclass(frozen=True)
class MoeLayer:
    """One sparse layer.

    Attributes:
        name: path of the experts module in transformers' model, such as `model.layers.0.mlp.experts`.
        projections: what is compressed, in the order of the computation.
        router: the checkpoint's tensors of the router.
        shared: the checkpoint's tensors of the experts that every token visits, and of their gate.
    """

    name: str
    projections: tuple[Projection, ...]
    router: tuple[str, ...]
    shared: tuple[str, ...]

    @property
    def experts(self) -> int:
        """How many experts the router chooses from."""
        return self.projections[0].shape[0]


@dataclass(frozen=True)
class MoeModel:
    """A described checkpoint.

    Attributes:
        architecture: transformers' model type.
        layers: the sparse layers.
        dense_names: every tensor that no projection consumes, in the checkpoint's order.
        notes: what a user should know, in full sentences.
        dense: the linear layers outside the experts, block by block. Their tensors are in `dense_names`: whether they
            are packed is the method's choice.
        beyond: experts of layers that transformers' model does not have (`checkpoint.beyond`). Their tensors are in
            `dense_names`: they are packed where somebody asks for it.
        unread: tensors that the model does not have (`checkpoint.unread`), those of `beyond` among them. They are in
            `dense_names`.
    """

    architecture: str
    layers: tuple[MoeLayer, ...]
    dense_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    dense: tuple[DenseLayer, ...] = ()
    beyond: tuple[MoeLayer, ...] = ()
    unread: tuple[str, ...] = ()
