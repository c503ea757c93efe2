"""Chooses the group sizes of a whole model under a byte budget.

For each tensor and group size, the squared error is measured on a sample of rows (all rows of small tensors). The
budget is then spent where a byte reduces the error most. Errors of different tensors are relative to their mean
squares, because the scale of a tensor depends on how a checkpoint is written: with absolute errors SmolLM2-135M at 3
bits loses +0.90 / +0.72 at the bytes of groups of 64, with relative ones +0.54 / +0.55 (4 windows of WikiText-2 /
novels). An expert's error is weighted by the share of tokens that visit an expert.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moepack.allocation import Candidate, allocate
from moepack.allocation.importance import visits
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.methods.base import Shape
from moepack.methods.finequant.sizes import GroupSize, packed_bytes, sizes_for
from moepack.solvers.groupwise import group_values, quantize_groupwise

__all__ = ["REFERENCE", "Proposal", "plan_sizes", "proposals"]

SAMPLE = 1 << 20
"""Approximate number of weights per tensor on which errors are measured."""

Weighing = tuple[torch.Tensor, torch.Tensor]
"""Factors of a tensor's rows [E, R] and columns [E, C], or [1, C] if matrices share them."""

REFERENCE = 64
"""The group size whose total bytes are the default budget."""


@dataclass(frozen=True)
class Proposal:
    """The group size candidates of a tensor.

    Attributes:
        name: packed name.
        shape: experts, rows, columns.
        bits: bits per code.
        candidates: one per group size.
    """

    name: str
    shape: Shape
    bits: int
    candidates: Sequence[Candidate[GroupSize]]


def plan_sizes(
    proposed: Sequence[Proposal], bits_per_weight: float | None, symmetric: bool = True
) -> dict[str, GroupSize]:
    """Choose the group size of every tensor, by packed name.

    Args:
        proposed: result of `proposals`.
        bits_per_weight: the budget, including all metadata; None means the size with groups of 64.
        symmetric: whether groups have no offset.

    Raises:
        ValueError: the budget is below the size with one scale per row.
    """
    weights = sum(math.prod(one.shape) for one in proposed)
    if bits_per_weight is None:
        budget = sum(packed_bytes(one.shape, one.bits, REFERENCE, symmetric) for one in proposed)
    else:
        budget = round(weights * bits_per_weight / 8)
    least = sum(min(candidate.nbytes for candidate in one.candidates) for one in proposed)
    if least > budget:
        rate = 8 * least / max(weights, 1)
        raise ValueError(f"one scale per row takes {rate:.3f} bits per weight, but the budget is {bits_per_weight}")
    choices = allocate([one.candidates for one in proposed], budget)
    return {one.name: choice.candidate.specification for one, choice in zip(proposed, choices, strict=True)}


def proposals(
    checkpoint: Checkpoint,
    model: MoeModel,
    bits: Mapping[str, int],
    symmetric: bool = True,
    weighing: Mapping[str, Weighing] | None = None,
    sizes: Sequence[GroupSize] | None = None,
    sample: int = SAMPLE,
) -> Iterator[Proposal]:
    """Measure the loss and size of each group size for every tensor of a model.

    Args:
        checkpoint: the source.
        model: its description.
        bits: bits per code by role ("experts" and the linear layers to pack).
        symmetric: whether groups have no offset.
        weighing: factors that make the squared errors of a tensor's weights count equally, by packed tensor name. The
            default is relative errors, weighted by the share of tokens that visit an expert.
        sizes: group sizes to try; None means all distinct ones.
        sample: approximate number of weights per tensor on which errors are measured.

    Raises:
        InvalidTensorError: a sampled weight is NaN or infinite.
    """
    known = weighing or {}

    def propose(name: str, shape: Shape, width: int, usual: float, matrices: Iterable[torch.Tensor]) -> Proposal:
        values, rows = _sample(shape, matrices, sample)
        factor = shape[1] / max(len(rows), 1)
        factors = _factors(known[name], rows) if name in known else None
        factor *= usual / _mean_square(values) if factors is None else 1.0
        found = []
        for size in sizes or sizes_for(shape[2]):
            groups = quantize_groupwise(values, width, size, symmetric=symmetric, name=name)
            # NumPy sums, because torch's order depends on the number of threads, and sizes could change with it.
            error = group_values(groups, width, size) - values
            error = (error if factors is None else error * factors).square_().sum(-1).numpy().sum(dtype="float64")
            nbytes = packed_bytes(shape, width, size, symmetric)
            found.append(Candidate("groupwise", size, nbytes, factor * float(error)))
        return Proposal(name, shape, width, found)

    chosen = described(model.architecture).top_k(checkpoint.config)
    for layer in model.layers:
        share = visits(chosen, layer.experts)
        for part in layer.projections:
            yield propose(part.packed_name, part.shape, bits["experts"], share, map(part.expert, range(layer.experts)))
    for dense in model.dense:
        for linear in dense.only(frozenset(bits)).linears:
            yield propose(linear.source, (1, *linear.shape), bits[linear.role], 1.0, [linear.matrix()])


def _sample(shape: Shape, matrices: Iterable[torch.Tensor], sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return evenly spaced rows of every matrix, `[N, C]` float32, and which rows of a matrix they are."""
    experts, rows, columns = shape
    count = min(rows, max(1, sample // max(experts * columns, 1)))
    chosen = torch.arange(count) * rows // max(count, 1)
    parts = [matrix[chosen].float() for matrix in matrices]
    return torch.cat([torch.empty(0, columns), *parts]), chosen


def _mean_square(values: torch.Tensor) -> float:
    """Return the mean square of the values, or 1 if they are all zero."""
    # NumPy, as for errors.
    return float(values.square().sum(-1).numpy().sum(dtype="float64")) / max(values.numel(), 1) or 1.0


def _factors(weighing: Weighing, rows: torch.Tensor) -> torch.Tensor:
    """Return the factors of the sampled rows of every matrix, `[N, C]`."""
    by_row, by_column = weighing
    return (by_row[:, rows, None] * by_column[:, None]).flatten(0, 1)
