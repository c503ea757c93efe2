"""The group sizes of a whole model under a byte budget.

Each tensor proposes its group sizes, with the squared error measured on a sample of rows (all rows of small tensors),
and the budget is spent where a byte buys most. Errors of different tensors are added as they are: the mean square of
an output's error is the squared error of its row times that of the inputs. An expert's error counts by the share of
tokens that visit one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moepack.allocation import Candidate, allocate
from moepack.allocation.importance import visits
from moepack.checkpoint import Checkpoint, MoeModel, Projection
from moepack.methods.base import Shape
from moepack.methods.finequant.sizes import GroupSize, packed_bytes, sizes_for
from moepack.solvers.groupwise import group_values, quantize_groupwise

__all__ = ["REFERENCE", "Proposal", "plan_sizes", "proposals"]

SAMPLE = 1 << 20
"""Weights of a tensor that errors are measured on, about."""

REFERENCE = 64
"""The group size whose bytes are the budget where none is given."""

_TOP_K = ("num_experts_per_tok", "num_selected_experts", "moe_top_k", "top_k")


@dataclass(frozen=True)
class Proposal:
    """The group sizes of a tensor to be packed: its packed name, its shape, its bits, a candidate for each size."""

    name: str
    shape: Shape
    bits: int
    candidates: Sequence[Candidate[GroupSize]]


def plan_sizes(
    proposed: Sequence[Proposal], bits_per_weight: float | None, symmetric: bool = True
) -> dict[str, GroupSize]:
    """The group size of every tensor, by its packed name.

    Args:
        proposed: what `proposals` measured.
        bits_per_weight: the budget, all metadata counted; None for the bytes of groups of 64.
        symmetric: whether groups have a scale only.

    Raises:
        ValueError: rows with one scale already take more than the budget.
    """
    weights = sum(math.prod(one.shape) for one in proposed)
    if bits_per_weight is None:
        budget = sum(packed_bytes(one.shape, one.bits, REFERENCE, symmetric) for one in proposed)
    else:
        budget = round(weights * bits_per_weight / 8)
    least = sum(min(candidate.nbytes for candidate in one.candidates) for one in proposed)
    if least > budget:
        rate = 8 * least / max(weights, 1)
        raise ValueError(f"one scale a row already takes {rate:.3f} bits a weight, the budget is {bits_per_weight}")
    choices = allocate([one.candidates for one in proposed], budget)
    return {one.name: choice.candidate.specification for one, choice in zip(proposed, choices, strict=True)}


def proposals(
    checkpoint: Checkpoint, model: MoeModel, bits: Mapping[str, int], symmetric: bool = True, search: bool = True
) -> Iterator[Proposal]:
    """What each group size costs every tensor of a model.

    Args:
        checkpoint: the source.
        model: its description.
        bits: bits a code by role ("experts" and those linear layers that are packed).
        symmetric: whether groups have a scale only.
        search: how scales are found.

    Raises:
        InvalidTensorError: a sampled weight is NaN or infinite.
    """
    # Switch says no k: one expert.
    chosen = next((checkpoint.config[key] for key in _TOP_K if isinstance(checkpoint.config.get(key), int)), 1)

    def propose(name: str, shape: Shape, width: int, sample: torch.Tensor, importance: float) -> Proposal:
        values, found = sample.float(), []
        for size in sizes_for(shape[2]):
            groups = quantize_groupwise(values, width, size, symmetric=symmetric, search=search, name=name)
            # Summed by NumPy: torch's order follows the number of threads, and sizes could follow it.
            error = (group_values(groups, width, size) - values).square_().sum(-1).numpy().sum(dtype="float64")
            nbytes = packed_bytes(shape, width, size, symmetric)
            found.append(Candidate("groupwise", size, nbytes, importance * float(error)))
        return Proposal(name, shape, width, found)

    for layer in model.layers:
        share = visits(chosen, layer.experts)
        for projection in layer.projections:
            sample, factor = _sample(projection)
            yield propose(projection.packed_name, projection.shape, bits["experts"], sample, factor * share)
    for dense in model.dense:
        for linear in dense.only(frozenset(bits)).linears:
            rows = _rows(linear.shape[0], max(1, SAMPLE // max(linear.shape[1], 1)))
            factor = linear.shape[0] / max(len(rows), 1)
            yield propose(linear.source, (1, *linear.shape), bits[linear.role], linear.matrix()[rows], factor)


def _sample(projection: Projection) -> tuple[torch.Tensor, float]:
    """Some rows of every expert, `[N, C]`, and how many rows each stands for."""
    experts, rows, columns = projection.shape
    chosen = _rows(rows, max(1, SAMPLE // max(experts * columns, 1)))
    parts = [projection.expert(expert)[chosen] for expert in range(experts)]
    sample = torch.cat(parts) if parts else torch.empty(0, columns)
    return sample, rows / max(len(chosen), 1)


def _rows(rows: int, count: int) -> torch.Tensor:
    """At most `count` rows at even distances."""
    if count >= rows:
        return torch.arange(rows)
    return torch.arange(count) * rows // count
