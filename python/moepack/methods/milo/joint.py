"""Jointly optimizes quantization and compensation of a matrix (MiLo, algorithm 1).

Two steps alternate: quantize the remainder of the compensator, W - UV, and approximate the quantization residual, W -
Wdq, by a matrix of rank r. With `refine`, the factors are quantized inside the loop, so that the quantizer sees the
compensator as stored; without it, they are quantized once at the end, as in the paper. The error is measured after each
round. A matrix stops by the paper's rule (equation 14: the mean of the last three errors falls by less than 1e-4 of
itself, or rises) or after 20 rounds, and its best round is kept. Each matrix of a batch stops on its own, so results do
not depend on the other matrices in the batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack.solvers.affine import AffineCodes, GroupSpec, Solver, quantize_residual
from moepack.solvers.low_rank import Factors, PackedFactors, decompose, measured_error, quantize_factors

__all__ = ["Compensated", "JointSettings", "compensate"]


@dataclass(frozen=True)
class JointSettings:
    """Settings of the alternation.

    Attributes:
        rank_bits: bits of the compensator: 3 or 8 for integers, 16 for float16.
        factor_group: columns of a factor that share a scale.
        refine: quantize the factors inside the loop.
        rounds: maximum number of rounds.
        tolerance: relative decrease of the windowed error below which a matrix stops.
        window: number of errors averaged.
        refits: passes of :func:`moepack.solvers.low_rank.quantize_factors`.
    """

    rank_bits: int = 3
    factor_group: int = 64
    refine: bool = True
    rounds: int = 20
    tolerance: float = 1e-4
    window: int = 3
    refits: int = 1


@dataclass
class Compensated:
    """Quantized matrices with compensators of equal rank.

    Attributes:
        codes: codes of [E, R, C].
        factors: the compensators as stored.
        errors: [E] float64, squared Frobenius norm of the remaining error.
        rounds: [E], number of rounds per matrix.
        traces: for each matrix, the Frobenius norm of the error after each round (equation 13).
    """

    codes: AffineCodes
    factors: PackedFactors
    errors: Tensor
    rounds: list[int]
    traces: list[list[float]]

    def values(self) -> Tensor:
        """Return the dequantized weights, [E, R, C] float32."""
        return self.codes.values() + self.factors.factors().product()


def compensate(
    weights: Tensor, rank: int, spec: GroupSpec, solver: Solver, settings: JointSettings, *, name: str | None = None
) -> Compensated:
    """Quantize matrices and fit compensators of one rank to the residuals.

    Args:
        weights: [E, R, C], finite, on any device.
        rank: rank of the compensators, 0 to min(R, C); 0 is plain quantization.
        spec: grid of the codes.
        solver: solver of the grid.
        settings: see :class:`JointSettings`.
        name: the tensor's name, for errors.

    Raises:
        InvalidTensorError: a weight is NaN, infinite or out of range of the parameters.
        ValueError: the rank exceeds the smaller side of the matrices.
    """
    weights = weights.float().contiguous()
    rounds = settings.rounds if rank else 1
    work = _Alternation(weights, rank, spec, solver, settings, name)
    for _ in range(rounds):
        if not work.round():
            break
    return work.result()


class _Alternation:
    """The state of a batch; `active` holds the matrices that have not stopped."""

    def __init__(
        self, weights: Tensor, rank: int, spec: GroupSpec, solver: Solver, settings: JointSettings, name: str | None
    ) -> None:
        self.weights, self.rank, self.spec, self.solver = weights, rank, spec, solver
        self.settings, self.name = settings, name
        self.active = torch.arange(len(weights), device=weights.device)
        self.traces: list[list[float]] = [[] for _ in range(len(weights))]
        self.windows = [deque[float](maxlen=settings.window) for _ in range(len(weights))]
        # For the active matrices: the weights, and alternately their compensation and their quantization residual.
        self.part, self.rest = weights, torch.zeros_like(weights)
        self.start: AffineCodes | None = None
        self.space: Tensor | None = None
        self.best: tuple[AffineCodes, Factors | PackedFactors] | None = None
        self.least = weights.new_full((len(weights),), torch.inf, dtype=torch.float64)

    def round(self) -> bool:
        """Run both steps for the active matrices; return whether any continues."""
        codes, squares = quantize_residual(
            self.part, self.rest, self.spec, self.solver, start=self.start, name=self.name
        )
        found, space = decompose(self.rest, self.rank, start=self.space)
        kept: Factors | PackedFactors = found
        if self.settings.refine or not self.rank:
            kept, gain = self._packed(self.rest, found)
        else:
            gain = measured_error(self.rest, found)
        errors = (squares + gain).clamp(min=0)
        self._keep(codes, kept, errors)
        self._continue(self._go_on(errors), codes, kept, space)
        return len(self.active) > 0

    def _packed(self, residual: Tensor, factors: Factors) -> tuple[PackedFactors, Tensor]:
        s = self.settings
        return quantize_factors(residual, factors, s.rank_bits, s.factor_group, refits=s.refits, name=self.name)

    def _keep(self, codes: AffineCodes, factors: Factors | PackedFactors, errors: Tensor) -> None:
        """Store the results of matrices that this round improved."""
        better = errors < self.least[self.active]
        index = self.active[better]
        self.least[index] = errors[better]
        if self.best is None or len(index) == len(self.weights):
            self.best = codes, factors
            return
        for old, new in zip(_tensors(*self.best), _tensors(codes, factors), strict=True):
            old[index] = new[better]

    def _continue(
        self, stays: Tensor, codes: AffineCodes, factors: Factors | PackedFactors, space: Tensor | None
    ) -> None:
        """Prepare the next round of the continuing matrices."""
        values = _values(factors)
        if not bool(stays.all()):
            self.active, codes = self.active[stays], _pick(codes, stays)
            self.part, self.rest = self.part[stays], self.rest[stays]
            values = Factors(values.left[stays], values.right[stays])
            space = None if space is None else space[stays]
        self.start, self.space = codes, space
        torch.matmul(values.left.mT, values.right, out=self.rest)

    def _go_on(self, errors: Tensor) -> Tensor:
        """Evaluate equation 14 for each active matrix, [A] bool."""
        stays = []
        for matrix, error in zip(self.active.tolist(), errors.sqrt().tolist(), strict=True):
            window, trace = self.windows[matrix], self.traces[matrix]
            before = sum(window) / len(window) if window else None
            window.append(error)
            trace.append(error)
            mean = sum(window) / len(window)
            stays.append(before is None or (before > 0 and (before - mean) / before >= self.settings.tolerance))
        return torch.tensor(stays, dtype=torch.bool, device=errors.device)

    def result(self) -> Compensated:
        """Return the best round of each matrix, with the errors of the stored values."""
        assert self.best is not None
        codes, factors = self.best
        residual = self.weights - codes.values()
        if isinstance(factors, Factors):
            factors, _ = self._packed(residual, factors)
        errors = _squared(residual - factors.factors().product())
        return Compensated(codes, factors, errors, [len(trace) for trace in self.traces], self.traces)


def _squared(difference: Tensor) -> Tensor:
    """Return squared Frobenius norms, [E] float64; rows are summed in float32. Overwrites its argument."""
    return difference.square_().sum(2).double().sum(1)


def _values(factors: Factors | PackedFactors) -> Factors:
    return factors.factors() if isinstance(factors, PackedFactors) else factors


def _tensors(codes: AffineCodes, factors: Factors | PackedFactors) -> list[Tensor]:
    """Return all tensors of a batch whose first axis runs over the matrices."""
    found = [codes.codes, codes.scales] + ([] if codes.offsets is None else [codes.offsets])
    for factor in (factors.left, factors.right):
        found += [factor] if isinstance(factor, Tensor) else [factor.codes, factor.scales]
    return found


def _pick(codes: AffineCodes, which: Tensor) -> AffineCodes:
    offsets = None if codes.offsets is None else codes.offsets[which]
    return replace(codes, codes=codes.codes[which], scales=codes.scales[which], offsets=offsets)
