"""The method `milo`: INT3 (or 2, 4, 8 bits) with a mixture of low-rank compensators (MiLo, MLSys 2025).

Every linear layer except the output head is quantized group by group. The residual of each matrix is approximated by a
packed low-rank product; both are optimized jointly (`joint`). The rank of each matrix is decided in advance for the
whole model (`ranks`, `planning`). Calibration text is optional and only serves to count how often experts are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.base import (
    Expected,
    Method,
    MethodPlan,
    PackedBytes,
    Shape,
    SimpleMethod,
    Solution,
    Stage,
    Weights,
)
from moepack.methods.fitting import DENSE, Fitted, Wanted
from moepack.methods.milo.frequency import count_choices
from moepack.methods.milo.joint import Compensated, JointSettings, compensate
from moepack.methods.milo.packing import FACTOR_GROUP, Assembly, base_bytes, pack, packed_bytes
from moepack.methods.milo.planning import DENSE_ROLES, Planner, RankPlan, batches, workers
from moepack.methods.milo.ranks import parse_ranks
from moepack.methods.milo.settings import DEFAULT_RANK, SAMPLES, SEQUENCE_LENGTH, MiloSettings
from moepack.methods.milo.statistics import FULL_SIDE, kurtosis, residual_rank, residual_spectrum
from moepack.methods.mixins import Goal, MeetsSize, PacksLinears
from moepack.methods.parallel import for_experts
from moepack.methods.pinned import Pin, PinsBits, check_bits
from moepack.methods.rate.pinned import pinned_bytes
from moepack.methods.settings import in_words
from moepack.progress import Progress
from moepack.solvers.affine import GroupSpec, Solver, check_range, quantize_affine, round_to_nearest
from moepack.solvers.hqq import HalfQuadratic
from moepack.solvers.least_squares import LeastSquares
from moepack.solvers.widths import BITS

__all__ = ["SOLVERS", "Milo"]

SOLVERS: dict[str, Solver] = {"lsq": LeastSquares(), "hqq": HalfQuadratic(), "rtn": round_to_nearest}
"""Group quantizers by name."""


@dataclass
class Milo(MiloSettings, Fitted, PinsBits, MeetsSize, PacksLinears, SimpleMethod):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = in_words(BITS)
    pinned_roles: ClassVar[frozenset[str]] = DENSE_ROLES

    _ranks: RankPlan = field(default_factory=RankPlan, init=False, repr=False)
    _text: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.memory_budget is not None:
            raise ValueError("rank and memory_budget are mutually exclusive")
        self._terms = parse_ranks(self.rank or DEFAULT_RANK)
        if self.calibration is None:
            if any(term.policy == "frequency" for term in self._terms):
                raise ValueError("rank by frequency requires a calibration text: set calibration")
            if (self.samples, self.sequence_length) != (SAMPLES, SEQUENCE_LENGTH):
                raise ValueError("samples and sequence_length require a calibration text: set calibration")
        self._specs = [GroupSpec(self.bits, self.group_size, bool(self.symmetric))]
        if self.symmetric is None and (self.memory_budget is not None or self._terms[0].policy == "budget"):
            self._specs.append(GroupSpec(self.bits, self.group_size, True))
        self._joint = JointSettings(self.rank_bits, FACTOR_GROUP, self.refine, self.rounds)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output.

        The text is represented by its fingerprint once `plan` has read it.
        """
        found: dict[str, Any] = {
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": "by budget" if len(self._specs) > 1 else bool(self.symmetric),
            "solver": self.solver,
            "rank_bits": self.rank_bits,
            "refine": self.refine,
            "rounds": self.rounds,
        }
        if self.memory_budget is not None or self._terms[0].policy == "budget":
            found["dense_weight"] = self.dense_weight
        if self.memory_budget is not None:
            found["memory_budget"] = self.memory_budget
        else:
            found["rank"] = self.rank or DEFAULT_RANK
        if self.calibration is not None:
            found["calibration_sha256"] = self._text
        return found

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    def goal(self, checkpoint: Checkpoint, model: MoeModel) -> Goal | None:
        """Return the memory budget."""
        return None if self.memory_budget is None else Goal(self.memory_budget)

    @property
    def dense_roles(self) -> frozenset[str]:
        """All roles except the output head."""
        return DENSE_ROLES

    @property
    def looks_ahead(self) -> bool:
        """Whether ranks depend on weights or on a text."""
        policies = {term.policy for term in self._terms}
        return self.memory_budget is not None or bool(policies & {"budget", "kurtosis", "frequency"})

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Decide the ranks.

        Raises:
            CalibrationError: the text is unusable.
            InvalidTensorError: a weight cannot be quantized.
            ValueError: the memory budget is below the size without compensators.
        """
        packer, counts = copy(self), dict[str, list[int]]()
        if self.calibration is not None:
            counts, packer._text = count_choices(
                checkpoint, model, self.calibration, self.samples, self.sequence_length, self.device
            )
        planner = Planner(
            self._specs, SOLVERS[self.solver], self.rank_bits, torch.device(self.device), counts, self.dense_weight,
            self._pinned_bits, pinned_bytes(self),
        )  # fmt: skip
        packer._ranks = found = planner.plan(checkpoint, model, self._terms, self.memory_budget)
        decisions = {name: ([*map(int, ranks)], found.specs[name].symmetric) for name, ranks in found.ranks.items()}
        goal = self.goal(checkpoint, model)
        return MethodPlan(self, packer, checkpoint.fingerprint(), packer.settings, decisions=decisions, goal=goal)

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return no other methods: the grid of each tensor has its own bits, and ranks are decided for all together."""
        check_bits([pin.one or 0 for pin in pins], BITS, self.name, self.pinned_bits)
        return {}

    @property
    def _pinned_bits(self) -> Mapping[str, float]:
        return {} if self.pinned is None else self.pinned.bits

    def _grid(self, name: str) -> GroupSpec:
        """Return the first grid of a packed tensor."""
        return replace(self._specs[0], bits=int(self._pinned_bits.get(name, self.bits)))

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the maximum packed size, with the largest total rank of any tensor with as many experts."""
        sums = [sum(ranks) for ranks in self._ranks.ranks.values() if len(ranks) == shape[0]]
        widest = replace(self._specs[0], bits=int(max([self.bits, *self._pinned_bits.values()])))
        return packed_bytes(shape, widest, max(sums, default=0), self.rank_bits)

    def expected(self, weights: Weights) -> Expected:
        """Return the size with the mean rank, or the size without compensators plus the budget's percentage."""
        first, dense = self._terms[0], weights.role != "experts"
        if first.policy == "budget":
            return Expected(base_bytes(weights.shape, self._grid(weights.name)) * (1 + first.amount / 100), exact=False)
        rank = sum(t.amount for t in self._terms if t.policy == "uniform" or (t.policy == "dense") == dense)
        total = round(weights.shape[0] * min(rank, *weights.shape[1:]))
        return Expected(packed_bytes(weights.shape, self._grid(weights.name), total, self.rank_bits), exact=False)

    @classmethod
    def fitted(cls, wanted: Wanted) -> Milo:
        """Meet a size by the bits and the memory budget; see `Fitted`."""
        bits = next((bits for bits in reversed(BITS) if wanted.bits(DENSE) >= bits + 0.3), None)
        if bits is None:
            raise ValueError("two bits in groups take more")
        return cls(bits, memory_budget=wanted.size, device=wanted.text.get("device", "cpu"))

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize and compensate one tensor in batches of experts; holds its codes."""
        ((name, weights),) = stage.tensors.items()
        _, rows, columns = weights.shape
        ranks, spec = self._ranks.ranks[weights.name], self._ranks.specs[weights.name]
        assembly = Assembly(weights.shape, spec, ranks, self.rank_bits)
        facts = _Facts(ranks)
        jobs = [
            (rank, batch)
            for rank in sorted(set(ranks))
            for batch in batches([e for e, its in enumerate(ranks) if its == rank], rows * columns)
        ]

        def work(number: int) -> None:
            rank, batch = jobs[number]
            matrices = torch.stack([self._fetch(weights, expert) for expert in batch])
            found = compensate(matrices, rank, spec, SOLVERS[self.solver], self._joint, name=weights.name)
            assembly.put(batch, found.codes, found.factors)
            facts.add(batch, matrices, found, self._residual_ranks(matrices, found))

        sizes = iter(len(batch) * rows * columns for _, batch in jobs)
        for_experts(work, len(jobs), lambda: stage.advance(next(sizes)), most=workers(rows * columns), alone=True)
        return {name: Solution(assembly.parts(), details=facts.details())}

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack the codes and the compensators, if any."""
        spec, ranks = self._ranks.specs[weights.name], self._ranks.ranks[weights.name]
        return pack(solution.parts, spec, ranks, self.rank_bits, weights.ndim)

    def _fetch(self, weights: Weights, expert: int) -> torch.Tensor:
        """Return one matrix; checks its range here, where its source tensor is known."""
        matrix = weights.expert(expert, torch.device(self.device)).float()
        check_range(matrix, self._specs[0].storage, weights.sources[expert])
        return matrix

    def _residual_ranks(self, matrices: torch.Tensor, found: Compensated) -> list[int | None]:
        """Return the residual ranks of plain quantization (table 2), or None if they are expensive to compute."""
        side = min(matrices.shape[1:])
        if side > FULL_SIDE // 4 or not side:
            return [None] * len(matrices)
        plain = found.codes
        if found.factors.factors().rank:
            plain = quantize_affine(matrices, plain.spec, SOLVERS[self.solver])
        return residual_rank(residual_spectrum(matrices - plain.values()), side)


class _Facts:
    """Statistics that `inspect` shows for each matrix of a tensor."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = [*ranks]
        self.lost, self.energy, self.kurtosis = ([0.0] * len(ranks) for _ in range(3))
        self.residual: list[int | None] = [None] * len(ranks)

    def add(
        self, batch: Sequence[int], matrices: torch.Tensor, found: Compensated, residual: Sequence[int | None]
    ) -> None:
        """Record a batch; thread-safe."""
        sums = (found.errors, matrices.double().square().sum((1, 2)), kurtosis(matrices))
        for expert, lost, energy, tail, rank in zip(batch, *(part.tolist() for part in sums), residual, strict=True):
            self.lost[expert], self.energy[expert] = lost, energy
            self.kurtosis[expert], self.residual[expert] = round(tail, 4), rank

    def details(self) -> dict[str, Any]:
        """Return JSON values."""
        errors = [
            (lost / energy) ** 0.5 if energy else 0.0 for lost, energy in zip(self.lost, self.energy, strict=True)
        ]
        energy = sum(self.energy)
        found: dict[str, Any] = {"relative_error": _digits(sum(self.lost) / energy if energy else 0.0)}
        found |= {"ranks": self.ranks, "errors": [_digits(error) for error in errors], "kurtosis": self.kurtosis}
        return found if None in self.residual else {**found, "residual_ranks": self.residual}


def _digits(value: float) -> float:
    """Round to five significant digits for reports."""
    return float(f"{value:.4e}")
