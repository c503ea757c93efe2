"""Ranks for a whole model, decided before its first layer is compressed.

Policies that look at weights (kurtosis, budget) read the model once, one batch of experts at a time; only a few numbers
a matrix are kept. The budget policy rounds everything once and takes the singular values of what is lost: their squares
are the measured fall of the error by each rank.

Errors count as shares of the squares of weights (`relative` importance). So all of a layer's experts together count as
much as one attention projection, though they have many times its weights: what a token meets is what counts. Among a
layer's experts those with the largest weights count most, and training has made those large that it chose often: on the
measured models the squared norm follows the frequency with a correlation of 0.7 to 0.97 in most layers whose experts
are chosen unequally. Where frequencies are known, they replace that.
A budget also says which tensors do without offsets: most experts, whose ranks are worth more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moepack.allocation import Candidate, Chain, Choice, allocate
from moepack.allocation.candidates import Numbers
from moepack.allocation.importance import relative, shares
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import DenseLinear
from moepack.checkpoint.model import Projection
from moepack.methods.base import Shape
from moepack.methods.files import kept_bytes
from moepack.methods.milo.packing import base_bytes, factor_bytes, packed_bytes
from moepack.methods.milo.ranks import Term, named_ranks, rank_step
from moepack.methods.milo.statistics import kurtosis, residual_spectrum
from moepack.methods.parallel import for_experts
from moepack.solvers.affine import GroupSpec, Solver, check_range, quantize_affine

__all__ = ["DENSE_ROLES", "Planner", "RankPlan", "Source", "batches", "workers"]

DENSE_ROLES = frozenset({"attention", "shared", "mlp"})
"""Linear layers that are packed: all but the output head."""

_BATCH = 1 << 22
"""Weights that are worked on at a time, but at least one expert: 16 MB of float32."""
_IN_WORK = 1 << 28
"""Weights in work in all threads together, each with temporaries of some 24 bytes a weight: 6 GB at most."""


@dataclass(frozen=True)
class Source:
    """A tensor to be packed: name, [E, R, C], and the layer of its experts, or None where it is dense."""

    name: str
    shape: Shape
    layer: str | None
    part: Projection | DenseLinear

    def experts(self, which: Sequence[int], device: torch.device) -> Tensor:
        """Some of its matrices, [n, R, C] float32."""
        if isinstance(self.part, Projection):
            return torch.stack([self.part.expert(e).to(device, torch.float32) for e in which])
        return self.part.matrix().to(device, torch.float32)[None]

    def origin(self, expert: int) -> str:
        """The checkpoint's tensor that holds a matrix."""
        return self.part.parts[expert].tensor if isinstance(self.part, Projection) else self.part.source


def batches(experts: Sequence[int], weights: int) -> Iterator[list[int]]:
    """Cut experts of so many weights each into batches."""
    step = max(1, _BATCH // max(weights, 1))
    for first in range(0, len(experts), step):
        yield list(experts[first : first + step])


def workers(weights: int) -> int:
    """How many matrices of so many weights may be in work at a time."""
    return max(1, _IN_WORK // max(weights, 1))


@dataclass(frozen=True)
class RankPlan:
    """What was decided, by packed tensor: the rank of each expert, and the grid."""

    ranks: Mapping[str, list[int]] = field(default_factory=dict)
    specs: Mapping[str, GroupSpec] = field(default_factory=dict)


@dataclass
class Planner:
    """Finds ranks and grids.

    Attributes:
        specs: grids to choose from; the first unless a budget chooses.
        solver: their solver.
        rank_bits: of the compensators.
        device: where weights are looked at.
        frequency: by layer, how many tokens chose each expert; empty where it is unknown.
        dense_weight: what a dense layer's error counts, all experts of a projection together counting 1.
    """

    specs: Sequence[GroupSpec]
    solver: Solver
    rank_bits: int
    device: torch.device
    frequency: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dense_weight: float = 1.0

    def plan(self, checkpoint: Checkpoint, model: MoeModel, terms: Sequence[Term], memory: int | None) -> RankPlan:
        """The rank of each expert and the grid, by packed tensor.

        Args:
            checkpoint: the model.
            model: its description.
            terms: the policies; ignored where `memory` is given.
            memory: bytes that all safetensors files may take.

        Raises:
            InvalidTensorError: a weight cannot be quantized.
            ValueError: `memory` is less than the model takes without compensators, or frequencies are asked for and
                unknown.
        """
        sources = list(find_sources(model))
        counts = [source.shape[0] for source in sources]
        sides = np.repeat([min(source.shape[1:]) for source in sources], counts)
        dense = np.repeat([source.layer is None for source in sources], counts)
        if memory is not None or terms[0].policy == "budget":
            fixed = kept_bytes(checkpoint, model, {source.name for source in sources})
            if memory is None:
                plain = fixed + sum(base_bytes(source.shape, self.specs[0]) for source in sources)
                memory = int(plain * (1 + terms[0].amount / 100))
            return self._by_budget(sources, rank_step(sides), memory, fixed)
        chosen = np.concatenate([self._shares(source) for source in sources]) if self.frequency else None
        ranks = named_ranks(terms, sides, dense, self._kurtosis(sources, terms), chosen)
        parts = np.split(ranks, np.cumsum(counts)[:-1])
        found = {source.name: part.tolist() for source, part in zip(sources, parts, strict=True)}
        return RankPlan(found, {source.name: self.specs[0] for source in sources})

    def _kurtosis(self, sources: Sequence[Source], terms: Sequence[Term]) -> Numbers:
        if all(term.policy != "kurtosis" for term in terms):
            return np.zeros(sum(source.shape[0] for source in sources))
        found = [self._measure(source, lambda weights, _: kurtosis(weights)[:, None]) for source in sources]
        return np.concatenate(found)[:, 0]

    def _measure(self, source: Source, of: Callable[[Tensor, Sequence[int]], Tensor]) -> Numbers:
        """Numbers of every matrix of a tensor, [E, n], by its weights [e, R, C] and which experts they are."""
        _, rows, columns = source.shape
        parts = list(batches(range(source.shape[0]), rows * columns))
        found = [np.empty(0)] * len(parts)

        def work(number: int) -> None:
            numbers = of(source.experts(parts[number], self.device), parts[number])
            found[number] = numbers.double().cpu().numpy()

        for_experts(work, len(parts), lambda: None, most=workers(rows * columns), alone=True)
        return np.concatenate(found)

    def _shares(self, source: Source) -> Numbers:
        """For each matrix of a tensor the share of its layer's choices, a dense one's being 1."""
        return np.ones(1) if source.layer is None else shares(self.frequency[source.layer])

    def _by_budget(self, sources: Sequence[Source], step: int, memory: int, fixed: int) -> RankPlan:
        bare = fixed + sum(min(base_bytes(source.shape, spec) for spec in self.specs) for source in sources)
        if memory < bare:
            raise ValueError(f"the memory budget, {memory:,} bytes, is below the {bare:,} that no compensators take")

        def stored(choices: Sequence[Choice[GroupSpec]]) -> int:
            return sum(
                packed_bytes(source.shape, one.candidate.specification, int(one.steps.sum()) * step, self.rank_bits)
                for source, one in zip(sources, choices, strict=True)
            )

        proposed = [[self._propose(source, spec, step) for spec in self.specs] for source in sources]
        chosen = allocate(proposed, memory - fixed, stored)
        found = {source.name: choice for source, choice in zip(sources, chosen, strict=True)}
        return RankPlan(
            {name: (choice.steps * step).tolist() for name, choice in found.items()},
            {name: choice.candidate.specification for name, choice in found.items()},
        )

    def _propose(self, source: Source, spec: GroupSpec, step: int) -> Candidate[GroupSpec]:
        """A grid: what it costs and leaves of a tensor, and by how much each step of an expert's rank reduces that."""
        _, rows, columns = source.shape

        def errors(matrices: Tensor, which: Sequence[int]) -> Tensor:
            for expert, matrix in zip(which, matrices, strict=True):
                check_range(matrix, spec.storage, source.origin(expert))
            residual = matrices - quantize_affine(matrices, spec, self.solver).values()
            spectrum = residual_spectrum(residual)
            size = matrices.square().sum((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
            steps = min(rows, columns, spectrum.shape[1]) // step
            gains = spectrum[:, : steps * step].reshape(len(which), steps, step).sum(2)
            return torch.cat([size[:, None], residual.square().sum((1, 2))[:, None], gains], 1)

        found = self._measure(source, errors)
        importance = relative(found[:, 0], self._shares(source) if self.frequency else None)
        falls = found[:, 1:] * (importance * (self.dense_weight if source.layer is None else 1.0))[:, None]
        costs = np.full(falls.shape[1] - 1, step * factor_bytes(rows, columns, self.rank_bits), np.int64)
        chains = [Chain(costs, gains) for gains in falls[:, 1:]]
        return Candidate("compensated", spec, base_bytes(source.shape, spec), float(falls[:, 0].sum()), chains)


def find_sources(model: MoeModel) -> Iterator[Source]:
    """Everything that is packed, in a fixed order."""
    for block in model.dense:
        for linear in block.only(DENSE_ROLES).linears:
            yield Source(linear.source, (1, *linear.shape), None, linear)
    for layer in model.layers:
        for projection in layer.projections:
            yield Source(projection.packed_name, projection.shape, layer.name, projection)
