"""A sample of a model's weights: what is known of every tensor before it is packed.

A sample is rows that are coded together (a stream) at even distances over a tensor's matrices, as many as keep the
model's sample at `MOST` weights about, and one stream at least.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack.allocation.importance import visits
from moepack.arrays import is_finite
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.checkpoint.dense import DenseLinear
from moepack.errors import InvalidTensorError
from moepack.methods.base import Shape
from moepack.methods.rate.scales import Scales
from moepack.solvers.priced import BLOCK_ROWS, LARGEST, Profile

__all__ = ["Sample", "stream_rows", "take_sample"]

MOST = 1 << 25
"""Weights of a model's sample, about: small models are seen whole."""

NARROW = 2048
"""Most columns of a tensor whose streams have 64 rows, not 16."""


@dataclass(frozen=True)
class Sample:
    """What is known of all tensors that will be packed.

    Attributes:
        shapes: by the tensor's name, experts, rows and columns.
        widths: by the tensor's name, its step over the model's: an error that counts less is allowed to be larger.
        profile: of the weights, each over the width of its tensor.
        rows: by the tensor's name, those of its streams below one another, [R, C] in the checkpoint's type, or times
            their factors.
        scales: by the tensor's name, bits of its scales of rows and columns.
    """

    shapes: Mapping[str, Shape]
    widths: Mapping[str, float]
    profile: Profile
    rows: Mapping[str, Tensor]
    scales: Mapping[str, int]

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return sum(map(math.prod, self.shapes.values()))

    def factor(self, name: str) -> float:
        """How many weights of a tensor a sampled one stands for."""
        return math.prod(self.shapes[name]) / max(self.rows[name].numel(), 1)

    def values(self, name: str) -> Tensor:
        """The rows of a tensor over its width, float32."""
        return self.rows[name].to(torch.float32, copy=True).div_(self.widths[name])


@dataclass(frozen=True)
class _Source:
    name: str
    shape: Shape
    importance: float
    matrix: Callable[[int], Tensor]


def take_sample(
    checkpoint: Checkpoint,
    model: MoeModel,
    roles: frozenset[str],
    importance: Mapping[str, float] | None = None,
    scales: Mapping[str, Scales] | None = None,
    largest: int = LARGEST,
    only: Collection[str] | None = None,
) -> Sample:
    """Look at every tensor that will be packed.

    Steps are in proportion to one over the root of the importance: an equal price of a bit everywhere.

    Args:
        checkpoint: the source.
        model: its description.
        roles: of the linear layers outside the experts that are packed.
        importance: by the tensor's name, what an error of it counts, of the product if there are factors. What is not
            there counts the share of tokens that visit an expert, or 1 for a linear layer.
        scales: by the tensor's name, factors of its rows and columns: what is rounded is the product.
        largest: the largest magnitude of an integer with a length of its own.
        only: names of the tensors that are looked at; None for all.

    Raises:
        InvalidTensorError: a weight of the sample is NaN or infinite.
    """
    known_scales = scales or {}
    sources = [
        _scaled(source, known_scales.get(source.name))
        for source in _sources(checkpoint, model, roles)
        if only is None or source.name in only
    ]
    known = importance or {}
    widths = {source.name: known.get(source.name, source.importance) ** -0.5 for source in sources}
    taken: dict[str, Tensor] = {}
    bits = {source.name: known_scales[source.name].bits for source in sources if source.name in known_scales}
    sample = Sample({source.name: source.shape for source in sources}, widths, Profile(largest), taken, bits)
    weights = sample.weights
    for source in sources:
        taken[source.name] = _rows(source, weights)
        if taken[source.name].numel():
            sample.profile.add(sample.values(source.name), sample.factor(source.name))
    return sample


def _sources(checkpoint: Checkpoint, model: MoeModel, roles: frozenset[str]) -> Iterator[_Source]:
    chosen = described(model.architecture).top_k(checkpoint.config)
    for layer in model.layers:
        share = visits(chosen, layer.experts)
        for part in layer.projections:
            yield _Source(part.packed_name, part.shape, share, part.expert)
    for dense in model.dense:
        for linear in dense.only(roles).linears:
            yield _Source(linear.source, (1, *linear.shape), 1.0, only(linear))


def only(linear: DenseLinear) -> Callable[[int], Tensor]:
    """Its matrix, as that of an expert."""
    return lambda _: linear.matrix()


def _scaled(source: _Source, scales: Scales | None) -> _Source:
    if scales is None:
        return source
    return replace(source, matrix=lambda expert: scales.scaled(expert, source.matrix(expert)))


def _rows(source: _Source, weights: int) -> Tensor:
    """Rows of a tensor, of a model with so many weights, [R, C]."""
    experts, rows, columns = source.shape
    streams = -(-rows // stream_rows(columns)) * experts if columns else 0
    count = min(streams, max(1, round(streams * MOST / max(weights, 1))))
    found = [_stream(source, number * streams // count) for number in range(count)]
    return torch.cat(found) if found else torch.empty(0, columns)


def _stream(source: _Source, number: int) -> Tensor:
    """The rows of a stream, counted through all experts."""
    _, rows, columns = source.shape
    height = stream_rows(columns)
    expert, stream = divmod(number, -(-rows // height))
    values = source.matrix(expert)[stream * height : (stream + 1) * height]
    if not is_finite(values):
        raise InvalidTensorError("has NaN or infinite weights", tensor=source.name)
    return values.clone()


def stream_rows(columns: int) -> int:
    """Rows that are coded together (docs/format.md, section 9)."""
    return 64 if columns <= NARROW else BLOCK_ROWS
