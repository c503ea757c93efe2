"""Plans the ranks of a whole model before its first layer is compressed.

Policies that use weights (kurtosis, budget) read the model once, one batch of experts at a time, and keep only a few
numbers per matrix. The budget policy rounds every matrix once and computes the singular values of the residual; their
squares are the measured error reduction of each rank.

Errors are normalized by the squared norm of the weights (`relative` importance). All experts of a layer together
therefore count as much as one attention projection, although they have many times its weights, because what matters is
the layers that a token passes. Within a layer, experts with larger weights count more, because training enlarges
experts that it chooses often: on the measured models, the squared norm correlates with the frequency by 0.7 to 0.97 in
most layers whose experts are chosen unequally. Measured frequencies, if given, replace this estimate.

A budget also decides which tensors have no offsets: usually those of experts, where ranks gain more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
"""Roles of the linear layers that are packed: all except the output head."""

_BATCH = 1 << 22
"""Weights processed at a time, but at least one expert: 16 MB of float32."""
_IN_WORK = 1 << 28
"""Weights processed by all threads together, each with temporaries of about 24 bytes per weight: at most 6 GB."""


@dataclass(frozen=True)
class Source:
    """A tensor to pack: name, shape [E, R, C], and the layer of its experts, or None for a dense layer."""

    name: str
    shape: Shape
    layer: str | None
    part: Projection | DenseLinear

    def experts(self, which: Sequence[int], device: torch.device) -> Tensor:
        """Return some of its matrices, [n, R, C] float32."""
        if isinstance(self.part, Projection):
            return torch.stack([self.part.expert(e, device).float() for e in which])
        return self.part.matrix().to(device, torch.float32)[None]

    def origin(self, expert: int) -> str:
        """Return the name of the checkpoint tensor that holds a matrix."""
        return self.part.parts[expert].tensor if isinstance(self.part, Projection) else self.part.source


def batches(experts: Sequence[int], weights: int) -> Iterator[list[int]]:
    """Split experts with `weights` weights each into batches."""
    step = max(1, _BATCH // max(weights, 1))
    for first in range(0, len(experts), step):
        yield list(experts[first : first + step])


def workers(weights: int) -> int:
    """Return how many matrices with `weights` weights may be processed at a time."""
    return max(1, _IN_WORK // max(weights, 1))


@dataclass(frozen=True)
class RankPlan:
    """The rank of each expert, and the grid, by packed tensor."""

    ranks: Mapping[str, list[int]] = field(default_factory=dict)
    specs: Mapping[str, GroupSpec] = field(default_factory=dict)


@dataclass
class Planner:
    """Chooses ranks and grids.

    Attributes:
        specs: available grids; the first one is used unless a budget chooses.
        solver: solver of the grids.
        rank_bits: bits of the compensators.
        device: where weights are analyzed.
        frequency: by layer, the number of tokens that chose each expert; empty if unknown.
        dense_weight: weight of a dense layer's error; all experts of a projection together have weight 1.
        bits: by packed tensor, bits that replace those of the grids.
        apart: bytes of the tensors that another method packs, by name.
    """

    specs: Sequence[GroupSpec]
    solver: Solver
    rank_bits: int
    device: torch.device
    frequency: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dense_weight: float = 1.0
    bits: Mapping[str, float] = field(default_factory=dict)
    apart: Mapping[str, float] = field(default_factory=dict)

    def grids(self, name: str) -> Sequence[GroupSpec]:
        """Return the available grids of a packed tensor."""
        if name not in self.bits:
            return self.specs
        return [replace(spec, bits=int(self.bits[name])) for spec in self.specs]

    def plan(self, checkpoint: Checkpoint, model: MoeModel, terms: Sequence[Term], memory: int | None) -> RankPlan:
        """Return the rank of each expert and the grid, by packed tensor.

        Args:
            checkpoint: the model.
            model: its description.
            terms: the policies; ignored if `memory` is given.
            memory: maximum size of all safetensors files in bytes.

        Raises:
            InvalidTensorError: a weight cannot be quantized.
            ValueError: `memory` is below the size without compensators, or a policy needs unknown frequencies.
        """
        sources = [source for source in find_sources(model) if source.name not in self.apart]
        counts = [source.shape[0] for source in sources]
        sides = np.repeat([min(source.shape[1:]) for source in sources], counts)
        dense = np.repeat([source.layer is None for source in sources], counts)
        if memory is not None or terms[0].policy == "budget":
            fixed = kept_bytes(checkpoint, model, {source.name for source in sources} | self.apart.keys())
            fixed += math.ceil(sum(self.apart.values()))
            if memory is None:
                plain = fixed + sum(base_bytes(source.shape, self.grids(source.name)[0]) for source in sources)
                memory = int(plain * (1 + terms[0].amount / 100))
            return self._by_budget(sources, rank_step(sides), memory, fixed)
        chosen = np.concatenate([self._shares(source) for source in sources]) if self.frequency else None
        ranks = named_ranks(terms, sides, dense, self._kurtosis(sources, terms), chosen)
        parts = np.split(ranks, np.cumsum(counts)[:-1])
        found = {source.name: part.tolist() for source, part in zip(sources, parts, strict=True)}
        return RankPlan(found, {source.name: self.grids(source.name)[0] for source in sources})

    def _kurtosis(self, sources: Sequence[Source], terms: Sequence[Term]) -> Numbers:
        if all(term.policy != "kurtosis" for term in terms):
            return np.zeros(sum(source.shape[0] for source in sources))
        found = [self._measure(source, lambda weights, _: kurtosis(weights)[:, None]) for source in sources]
        return np.concatenate(found)[:, 0]

    def _measure(self, source: Source, of: Callable[[Tensor, Sequence[int]], Tensor]) -> Numbers:
        """Return statistics of every matrix of a tensor, [E, n].

        `of` computes them from weights [e, R, C] and expert numbers.
        """
        _, rows, columns = source.shape
        parts = list(batches(range(source.shape[0]), rows * columns))
        found = [np.empty(0)] * len(parts)

        def work(number: int) -> None:
            numbers = of(source.experts(parts[number], self.device), parts[number])
            found[number] = numbers.double().cpu().numpy()

        for_experts(work, len(parts), lambda: None, most=workers(rows * columns), alone=True)
        return np.concatenate(found)

    def _shares(self, source: Source) -> Numbers:
        """Return each matrix's share of its layer's expert choices; 1 for a dense layer."""
        return np.ones(1) if source.layer is None else shares(self.frequency[source.layer])

    def _by_budget(self, sources: Sequence[Source], step: int, memory: int, fixed: int) -> RankPlan:
        bare = fixed + sum(
            min(base_bytes(source.shape, spec) for spec in self.grids(source.name)) for source in sources
        )
        if memory < bare:
            raise ValueError(
                f"the memory budget of {memory:,} bytes is less than the size without compensators, {bare:,} bytes"
            )

        def stored(choices: Sequence[Choice[GroupSpec]]) -> int:
            return sum(
                packed_bytes(source.shape, one.candidate.specification, int(one.steps.sum()) * step, self.rank_bits)
                for source, one in zip(sources, choices, strict=True)
            )

        proposed = [[self._propose(source, spec, step) for spec in self.grids(source.name)] for source in sources]
        chosen = allocate(proposed, memory - fixed, stored)
        found = {source.name: choice for source, choice in zip(sources, chosen, strict=True)}
        return RankPlan(
            {name: (choice.steps * step).tolist() for name, choice in found.items()},
            {name: choice.candidate.specification for name, choice in found.items()},
        )

    def _propose(self, source: Source, spec: GroupSpec, step: int) -> Candidate[GroupSpec]:
        """Return a candidate for a grid: its size and loss, and the loss reduction of each rank step of each expert."""
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
    """Yield all tensors to pack, in a fixed order."""
    for block in model.dense:
        for linear in block.only(DENSE_ROLES).linears:
            yield Source(linear.source, (1, *linear.shape), None, linear)
    for layer in model.layers:
        for projection in layer.projections:
            yield Source(projection.packed_name, projection.shape, layer.name, projection)
