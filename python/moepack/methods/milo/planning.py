"""Ranks for a whole model, decided before its first layer is compressed.

Policies that look at weights (kurtosis, budget) read the model once, one batch of experts at a time; only a few numbers
a matrix are kept. The budget policy rounds everything once and takes the singular values of what is lost: their squares
are the measured fall of the error by each rank.

An error must be weighed before matrices can be compared. The measure is the squared error of a projection of a layer as
a share of the squares of its weights, summed over projections. So all of a layer's experts together count as much as
one attention projection, though they have many times its weights: what a token meets is what counts. Among a layer's
experts the same measure counts those most that have the largest weights, and training has made those large that it
chose often: on the measured models the squared norm follows the frequency with a correlation of 0.7 to 0.97 in most
layers whose experts are chosen unequally. Where frequencies are known, each expert's error counts as a share of its own
squares, and by its frequency, instead.
A budget also says which tensors do without offsets (`grids`): most experts, whose ranks are worth more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import DenseLinear
from moepack.checkpoint.model import Projection
from moepack.methods.base import Shape
from moepack.methods.milo.grids import Option, choose_grids
from moepack.methods.milo.packing import base_bytes, factor_bytes, packed_bytes
from moepack.methods.milo.ranks import Matrix, Numbers, Ranks, Term, fill_budget, named_ranks, rank_step
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
_TRIALS = 12
"""Sums that are tried, by bisection, until a budget is spent to within a 2000th of what is left for ranks."""
_TENSOR_HEADER, _SHARD_HEADER = 160, 192
"""Bytes of a shard's header: for each tensor besides its name, and for the file with its padding."""


@dataclass(frozen=True)
class Source:
    """A tensor to be packed: name, [E, R, C], whether it is dense, and the layer of its experts or None."""

    name: str
    shape: Shape
    dense: bool
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
    """What was decided, by packed tensor.

    Attributes:
        ranks: of each expert.
        specs: the grid.
    """

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
        matrices = [Matrix(s.name, e, s.shape[1], s.shape[2], s.dense) for s in sources for e in range(s.shape[0])]
        specs = {source.name: self.specs[0] for source in sources}
        if memory is not None or terms[0].policy == "budget":
            fixed = self._fixed_bytes(checkpoint, model, sources)
            if memory is None:
                plain = fixed + sum(base_bytes(source.shape, self.specs[0]) for source in sources)
                memory = int(plain * (1 + terms[0].amount / 100))
            ranks, specs = self._by_budget(sources, matrices, memory, fixed)
        else:
            ranks = named_ranks(terms, matrices, self._kurtosis(sources, terms), self._shares(sources))
        found: dict[str, list[int]] = {source.name: [] for source in sources}
        for matrix, rank in zip(matrices, ranks.tolist(), strict=True):
            found[matrix.tensor].append(rank)
        return RankPlan(found, specs)

    def _kurtosis(self, sources: Sequence[Source], terms: Sequence[Term]) -> Numbers:
        if all(term.policy != "kurtosis" for term in terms):
            return np.zeros(sum(source.shape[0] for source in sources))
        return np.concatenate(
            [self._measure(source, lambda weights, _: kurtosis(weights)[:, None])[:, 0] for source in sources]
        )

    def _measure(self, source: Source, of: Callable[[Tensor, Sequence[int]], Tensor]) -> Numbers:
        """Numbers of every matrix of a tensor, [E, n], by its weights [e, R, C] and which experts they are."""
        _, rows, columns = source.shape
        parts = list(batches(range(source.shape[0]), rows * columns))
        found: dict[int, Numbers] = {}

        def work(number: int) -> None:
            numbers = of(source.experts(parts[number], self.device), parts[number])
            found[number] = numbers.double().cpu().numpy()

        for_experts(work, len(parts), lambda: None, most=workers(rows * columns), alone=True)
        return np.concatenate([found[number] for number in range(len(parts))])

    def _shares(self, sources: Sequence[Source]) -> Numbers | None:
        """For each matrix the share of its layer's choices, a dense one's being 1; every expert counts once more than
        it was chosen, so that none is written off for a text that does not need it."""
        if not self.frequency:
            return None
        shares: list[float] = []
        for source in sources:
            if source.layer is None:
                shares += [1.0]
                continue
            counts = [count + 1 for count in self.frequency[source.layer]]
            shares += [count / sum(counts) for count in counts]
        return np.array(shares)

    def _fixed_bytes(self, checkpoint: Checkpoint, model: MoeModel, sources: Sequence[Source]) -> int:
        """What all safetensors files hold beside the packed tensors, to within the padding of headers."""
        packed = {source.name for source in sources if source.dense}
        total = _SHARD_HEADER * (1 + len(model.layers) + len(model.dense))
        for name in model.dense_names:
            if name not in packed:
                total += checkpoint.info(name).nbytes + _TENSOR_HEADER + len(name)
        return total + sum(_TENSOR_HEADER + len(source.name) for source in sources)

    def _by_budget(
        self, sources: Sequence[Source], matrices: Sequence[Matrix], memory: int, fixed: int
    ) -> tuple[Ranks, dict[str, GroupSpec]]:
        bare = fixed + sum(min(base_bytes(source.shape, spec) for spec in self.specs) for source in sources)
        if memory < bare:
            raise ValueError(f"the memory budget, {memory:,} bytes, is below the {bare:,} that no compensators take")
        step = rank_step(matrices)
        shares = self._shares(sources)
        options, first = [], 0
        for source in sources:
            weights = None if shares is None or source.dense else shares[first : first + source.shape[0]]
            cost = step * factor_bytes(source.shape[1], source.shape[2], self.rank_bits)
            options.append([self._option(source, spec, weights, cost, step) for spec in self.specs])
            first += source.shape[0]
        chosen = choose_grids(options, memory - fixed)
        best = [tensor[choice] for tensor, choice in zip(options, chosen, strict=True)]
        grids = [self.specs[choice] for choice in chosen]
        falls = [fall for option in best for fall in option.falls]
        costs = np.concatenate([np.full(len(option.falls), option.cost, np.float64) for option in best])
        # What ranks cost besides their rows, headers and padding, is found by trying.
        low, high = 0, memory - fixed - sum(option.nbytes for option in best)
        ranks, offer = np.zeros(len(falls), np.int64), high
        for _ in range(_TRIALS):
            found = fill_budget(falls, costs, offer) * step
            if self._bytes_of(sources, grids, found) <= memory - fixed:
                ranks, low = found, offer
            else:
                high = offer
            offer = (low + high) // 2
        return ranks, {source.name: spec for source, spec in zip(sources, grids, strict=True)}

    def _bytes_of(self, sources: Sequence[Source], grids: Sequence[GroupSpec], ranks: Ranks) -> int:
        """Bytes of all packed tensors."""
        total = first = 0
        for source, spec in zip(sources, grids, strict=True):
            own = ranks[first : first + source.shape[0]]
            total, first = total + packed_bytes(source.shape, spec, int(own.sum()), self.rank_bits), first + len(own)
        return total

    def _option(self, source: Source, spec: GroupSpec, weights: Numbers | None, cost: int, step: int) -> Option:
        """What a grid costs and leaves of a tensor, its experts weighed by `weights` or by their own size."""
        _, rows, columns = source.shape
        most = min(rows, columns) // step

        def errors(matrices: Tensor, which: Sequence[int]) -> Tensor:
            for expert, matrix in zip(which, matrices, strict=True):
                check_range(matrix, spec.storage, source.origin(expert))
            residual = matrices - quantize_affine(matrices, spec, self.solver).values()
            spectrum = residual_spectrum(residual)
            size = matrices.square().sum((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
            steps = min(most, spectrum.shape[1] // step)
            gains = spectrum[:, : steps * step].reshape(len(which), steps, step).sum(2)
            return torch.cat([size[:, None], residual.square().sum((1, 2))[:, None], gains], 1)

        found = self._measure(source, errors)
        sizes, falls = found[:, 0], found[:, 1:]
        counts = sizes / sizes.sum() if weights is None else weights
        falls = falls * (counts / sizes * (self.dense_weight if source.dense else 1.0))[:, None]
        return Option(base_bytes(source.shape, spec), float(falls[:, 0].sum()), falls[:, 1:], cost)


def find_sources(model: MoeModel) -> Iterator[Source]:
    """Everything that is packed, in a fixed order."""
    for block in model.dense:
        for linear in block.only(DENSE_ROLES).linears:
            yield Source(linear.source, (1, *linear.shape), True, None, linear)
    for layer in model.layers:
        for projection in layer.projections:
            yield Source(projection.packed_name, projection.shape, False, layer.name, projection)
