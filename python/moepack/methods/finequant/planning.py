"""The group sizes of a whole model under a byte budget.

For every tensor and every group size the squared error is measured on a sample of rows (all rows of small tensors) and
the bytes are computed; `allocate` then spends the budget where a byte buys most. Errors of different tensors are added
as they are: the mean square of an output's error is the squared error of its row times that of the inputs. An expert's
error counts by the share of tokens that visit one: with k of E experts chosen, k/E.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moepack.checkpoint import Checkpoint, MoeModel, Projection
from moepack.methods.base import Shape
from moepack.methods.finequant.sizes import Choice, GroupSize, allocate, packed_bytes, sizes_for
from moepack.solvers.groupwise import group_values, quantize_groupwise

__all__ = ["REFERENCE", "BudgetPlan", "choices_of", "token_share"]

SAMPLE = 1 << 20
"""Weights of a tensor that errors are measured on, about."""

REFERENCE = 64
"""The group size whose bytes are the budget where none is given."""

_TOP_K = ("num_experts_per_tok", "num_selected_experts", "moe_top_k", "top_k")


@dataclass(frozen=True)
class Tensor:
    """A tensor to be packed: its name, its shape, its bits, a sample of its rows, and how many rows that stands for."""

    name: str
    shape: Shape
    bits: int
    weight: float
    sample: torch.Tensor


@dataclass(frozen=True)
class BudgetPlan:
    """The group size of every tensor, by the name of the packed tensor."""

    sizes: Mapping[str, GroupSize]

    @classmethod
    def make(
        cls,
        checkpoint: Checkpoint,
        model: MoeModel,
        bits: Mapping[str, int],
        bits_per_weight: float | None,
        symmetric: bool,
        search: bool,
    ) -> "BudgetPlan":
        """Measure and allocate.

        Args:
            checkpoint: the source.
            model: its description.
            bits: bits a code by role ("experts" and those linear layers that are packed).
            bits_per_weight: the budget, all metadata counted; None for the bytes of groups of 64.
            symmetric: whether groups have a scale only.
            search: how scales are found.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
            ValueError: rows with one scale already take more than the budget.
        """
        return cls.fit(list(choices_of(checkpoint, model, bits, symmetric, search)), bits_per_weight, symmetric)

    @classmethod
    def fit(
        cls, found: Sequence[tuple[Tensor, Choice]], bits_per_weight: float | None, symmetric: bool
    ) -> "BudgetPlan":
        """Allocate among what `choices_of` measured; arguments and errors as for `make`."""
        choices = [choice for _, choice in found]
        reference = sum(packed_bytes(tensor.shape, tensor.bits, REFERENCE, symmetric) for tensor, _ in found)
        weights = sum(math.prod(tensor.shape) for tensor, _ in found)
        budget = reference if bits_per_weight is None else round(weights * bits_per_weight / 8)
        least = sum(min(choice.nbytes) for choice in choices)
        if least > budget:
            rates = f"{8 * least / max(weights, 1):.3f} bits a weight, the budget is {bits_per_weight}"
            raise ValueError(f"one scale a row already takes {rates}")
        picked = allocate(choices, budget)
        return cls({tensor.name: choice.sizes[at] for (tensor, choice), at in zip(found, picked, strict=True)})


def choices_of(
    checkpoint: Checkpoint, model: MoeModel, bits: Mapping[str, int], symmetric: bool = True, search: bool = True
) -> Iterator[tuple[Tensor, Choice]]:
    """What each group size costs every tensor of a model; arguments and errors as for `BudgetPlan.make`."""
    for tensor in _tensors(checkpoint, model, bits):
        yield tensor, _choice(tensor, symmetric, search)


def _tensors(checkpoint: Checkpoint, model: MoeModel, bits: Mapping[str, int]) -> Iterator[Tensor]:
    for layer in model.layers:
        share = token_share(checkpoint, layer.experts)
        for projection in layer.projections:
            sample, factor = _sample(projection)
            yield Tensor(projection.packed_name, projection.shape, bits["experts"], factor * share, sample)
    for dense in model.dense:
        for linear in dense.only(frozenset(bits)).linears:
            rows = _rows(linear.shape[0], max(1, SAMPLE // max(linear.shape[1], 1)))
            sample = linear.matrix()[rows]
            factor = linear.shape[0] / max(len(rows), 1)
            yield Tensor(linear.source, (1, *linear.shape), bits[linear.role], factor, sample)


def token_share(checkpoint: Checkpoint, experts: int) -> float:
    """The share of tokens that visit an expert: k / E; 1 / E for Switch, which says no k."""
    chosen = next((checkpoint.config[key] for key in _TOP_K if isinstance(checkpoint.config.get(key), int)), 1)
    return chosen / max(experts, 1)


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


def _choice(tensor: Tensor, symmetric: bool, search: bool) -> Choice:
    sizes = sizes_for(tensor.shape[2])
    values = tensor.sample.float()
    errors = []
    for size in sizes:
        found = quantize_groupwise(values, tensor.bits, size, symmetric=symmetric, search=search, name=tensor.name)
        error = (group_values(found, tensor.bits, size) - values).square_().sum(-1)
        errors.append(tensor.weight * float(error.numpy().sum(dtype="float64")))
    nbytes = tuple(packed_bytes(tensor.shape, tensor.bits, size, symmetric) for size in sizes)
    return Choice(sizes, nbytes, tuple(errors))
