"""A sample of a model's weights: what is known of every tensor before it is packed.

A sample is row blocks (16 rows) at even distances over a tensor's matrices, as many as keep the model's sample at
`MOST` weights about, and one at least.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.allocation.importance import visits
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.checkpoint.dense import DenseLinear
from moepack.errors import InvalidTensorError
from moepack.methods.base import Shape
from moepack.solvers.priced import BLOCK_ROWS, Profile

__all__ = ["Sample", "take_sample"]

MOST = 1 << 22
"""Weights of a model's sample, about."""


@dataclass(frozen=True)
class Sample:
    """What is known of all tensors that will be packed.

    Attributes:
        shapes: by the tensor's name, experts, rows and columns.
        widths: by the tensor's name, its step over the model's: an error that counts less is allowed to be larger.
        profile: of the weights, each over the width of its tensor.
    """

    shapes: Mapping[str, Shape]
    widths: Mapping[str, float]
    profile: Profile

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True)
class _Source:
    name: str
    shape: Shape
    importance: float
    matrix: Callable[[int], Tensor]


def take_sample(checkpoint: Checkpoint, model: MoeModel, roles: frozenset[str]) -> Sample:
    """Look at every tensor that will be packed.

    The importance of an expert is the share of tokens that visit one, that of a linear layer 1, and steps are in
    proportion to one over its root: an equal price of a bit everywhere.

    Args:
        checkpoint: the source.
        model: its description.
        roles: of the linear layers outside the experts that are packed.

    Raises:
        InvalidTensorError: a weight of the sample is NaN or infinite.
    """
    sources = list(_sources(checkpoint, model, roles))
    widths = {source.name: source.importance**-0.5 for source in sources}
    sample = Sample({source.name: source.shape for source in sources}, widths, Profile())
    for source in sources:
        experts, rows, columns = source.shape
        blocks = -(-rows // BLOCK_ROWS) * experts if columns else 0
        count = min(blocks, max(1, round(blocks * MOST / sample.weights)))
        found = [_block(source, number * blocks // count) for number in range(count)]
        taken = sum(block.numel() for block in found)
        for block in found:
            sample.profile.add(block / widths[source.name], math.prod(source.shape) / taken)
    return sample


def _sources(checkpoint: Checkpoint, model: MoeModel, roles: frozenset[str]) -> Iterator[_Source]:
    chosen = described(model.architecture).top_k(checkpoint.config)
    for layer in model.layers:
        share = visits(chosen, layer.experts)
        for part in layer.projections:
            yield _Source(part.packed_name, part.shape, share, part.expert)
    for dense in model.dense:
        for linear in dense.only(roles).linears:
            yield _Source(linear.source, (1, *linear.shape), 1.0, _only(linear))


def _only(linear: DenseLinear) -> Callable[[int], Tensor]:
    return lambda _: linear.matrix()


def _block(source: _Source, number: int) -> Tensor:
    """A row block of a tensor, counted through all experts."""
    _, rows, _ = source.shape
    expert, block = divmod(number, -(-rows // BLOCK_ROWS))
    values = source.matrix(expert)[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS].float()
    if not bool(torch.isfinite(values).all()):
        raise InvalidTensorError("has NaN or infinite weights", tensor=source.name)
    return values
