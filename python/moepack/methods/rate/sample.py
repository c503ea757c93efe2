"""A sample of a model's weights, taken from every tensor before packing.

A sample consists of runs of rows that are coded together (streams), evenly spaced over a tensor's matrices. The number
of streams keeps the model's sample at about `MOST` weights, with at least one stream per tensor.
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
"""Approximate number of weights in a model's sample; small models are sampled completely."""

NARROW = 2048
"""Maximum number of columns of a tensor whose streams have 64 rows instead of 16."""


@dataclass(frozen=True)
class Sample:
    """Sampled rows of all tensors to pack.

    Attributes:
        shapes: by tensor name: experts, rows and columns.
        widths: by tensor name: its step relative to the model's. Errors with less weight may be larger.
        profile: profile of the weights, each divided by the width of its tensor.
        rows: by tensor name: the concatenated rows of its streams, [R, C] in the checkpoint's dtype, or multiplied by
            their factors.
        scales: by tensor name: bits of its scales of rows and columns.
    """

    shapes: Mapping[str, Shape]
    widths: Mapping[str, float]
    profile: Profile
    rows: Mapping[str, Tensor]
    scales: Mapping[str, int]

    @property
    def weights(self) -> int:
        """Total number of weights."""
        return sum(map(math.prod, self.shapes.values()))

    def factor(self, name: str) -> float:
        """Return the number of weights that each sampled weight of a tensor represents."""
        return math.prod(self.shapes[name]) / max(self.rows[name].numel(), 1)

    def values(self, name: str) -> Tensor:
        """Return the rows of a tensor divided by its width, float32."""
        return self.rows[name].to(torch.float32, copy=True).div_(self.widths[name])


@dataclass(frozen=True)
class _Source:
    name: str
    shape: Shape
    importance: float
    matrix: Callable[[int], Tensor]
    scales: Scales | None = None

    def rows(self, expert: int, some: slice) -> Tensor:
        """Return some rows of an expert, times their factors if there are any."""
        matrix = self.matrix(expert)
        return matrix[some] if self.scales is None else self.scales.scaled(expert, matrix, some)


def take_sample(
    checkpoint: Checkpoint,
    model: MoeModel,
    roles: frozenset[str],
    importance: Mapping[str, float] | None = None,
    scales: Mapping[str, Scales] | None = None,
    largest: int = LARGEST,
    only: Collection[str] | None = None,
) -> Sample:
    """Sample every tensor to pack.

    Steps are proportional to the inverse root of the importance, which gives an equal price of a bit everywhere.

    Args:
        checkpoint: the source.
        model: its description.
        roles: roles of the linear layers outside the experts to pack.
        importance: by tensor name, the weight of a squared error (of the product, if there are factors). The default is
            the share of tokens that visit an expert, or 1 for a linear layer.
        scales: by tensor name, factors of rows and columns; their product with the weights is rounded.
        largest: the largest integer magnitude with its own code length.
        only: names of the tensors to sample; None for all.

    Raises:
        InvalidTensorError: a sampled weight is NaN or infinite.
    """
    known_scales = scales or {}
    sources = [
        replace(source, scales=known_scales.get(source.name))
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
    """Return a function that returns the layer's matrix for any expert number."""
    return lambda _: linear.matrix()


def _rows(source: _Source, weights: int) -> Tensor:
    """Return sampled rows of a tensor, [R, C]; `weights` is the size of the model."""
    experts, rows, columns = source.shape
    streams = -(-rows // stream_rows(columns)) * experts if columns else 0
    count = min(streams, max(1, round(streams * MOST / max(weights, 1))))
    # Copied into one tensor: small pieces that outlive large temporaries would fragment the heap.
    found, taken = torch.empty(0, columns), 0
    for number in range(count):
        stream = _stream(source, number * streams // count)
        if not number:
            found = torch.empty(count * len(stream), columns, dtype=stream.dtype)
        found[taken : taken + len(stream)] = stream
        taken += len(stream)
    return found[:taken]


def _stream(source: _Source, number: int) -> Tensor:
    """Return the rows of a stream, counted through all experts; possibly a view of the checkpoint."""
    _, rows, columns = source.shape
    height = stream_rows(columns)
    expert, stream = divmod(number, -(-rows // height))
    values = source.rows(expert, slice(stream * height, (stream + 1) * height))
    if not is_finite(values):
        raise InvalidTensorError("has NaN or infinite weights", tensor=source.name)
    return values


def stream_rows(columns: int) -> int:
    """Return the number of rows that are coded together (docs/format.md, section 9)."""
    return 64 if columns <= NARROW else BLOCK_ROWS
