"""What a method packs at a time: the projections of a layer of experts, or the linear layers of a block.

Both are weights with a name, a place in the manifest and a size; the rest of the pipeline need not tell them apart.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moepack.checkpoint import DenseLayer, MoeLayer, Projection
from moepack.checkpoint.dense import DenseLinear
from moepack.methods import DenseMethod, Method, PackedTensor, Weights

WEIGHT = "weight"
"""What the manifest calls the projection of a linear layer."""

PackedLayer = MoeLayer | DenseLayer


@dataclass(frozen=True)
class Unit:
    """One tensor to be packed.

    Attributes:
        key: what the method calls it: the projection's name, or the path of the linear layer.
        weights: what the method gets.
        shape: shape for the manifest: [experts, rows, columns], or [rows, columns].
        module, projection: its place in transformers' model.
        nbytes: size in bytes in the checkpoint.
    """

    key: str
    weights: Weights
    shape: tuple[int, ...]
    module: str
    projection: str
    nbytes: int

    @property
    def packed_name(self) -> str:
        """Name of the packed tensor."""
        return self.weights.name


def units(layer: PackedLayer) -> Iterator[Unit]:
    """Give what a layer consists of, in the order of the computation."""
    if isinstance(layer, MoeLayer):
        yield from (_projection(layer, projection) for projection in layer.projections)
    else:
        yield from map(_linear, layer.linears)


def bound(method: Method, layer: PackedLayer) -> int:
    """Return the most bytes that a layer can take packed."""
    if isinstance(layer, MoeLayer):
        return sum(method.bound(projection.shape) for projection in layer.projections)
    assert isinstance(method, DenseMethod)
    return sum(method.dense_bound((1, *linear.shape), linear.role) for linear in layer.linears)


def compress(method: Method, layer: PackedLayer, advance: Callable[[int], None]) -> Iterator[tuple[Unit, PackedTensor]]:
    """Let the method pack a layer; gives each unit once, with the role of a linear layer among the details."""
    by_key = {unit.key: unit for unit in units(layer)}
    weights = {key: unit.weights for key, unit in by_key.items()}
    if isinstance(layer, MoeLayer):
        for key, tensor in method.compress_layer(weights, advance):
            yield by_key[key], tensor
        return
    assert isinstance(method, DenseMethod)
    for key, tensor in method.compress_dense(weights, advance):
        unit = by_key[key]
        yield unit, PackedTensor(tensor.kind, tensor.data, {**tensor.details, "role": unit.weights.role})


def _projection(layer: MoeLayer, projection: Projection) -> Unit:
    sources = tuple(part.tensor for part in projection.parts)
    weights = Weights(projection.packed_name, projection.shape, projection.expert, sources)
    return Unit(projection.name, weights, projection.shape, layer.name, projection.name, projection.nbytes)


def _linear(linear: DenseLinear) -> Unit:
    def matrix(_: int) -> torch.Tensor:
        return linear.matrix()

    weights = Weights(linear.source, (1, *linear.shape), matrix, (linear.source,), linear.role)
    return Unit(linear.name, weights, linear.shape, linear.name, WEIGHT, linear.nbytes)
