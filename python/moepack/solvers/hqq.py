"""Half-quadratic quantization, the solver used by MiLo (equations 4-9): offsets under an l_p norm, p < 1.

The problem min ||x - deq(x)||_p is split by an auxiliary variable M for the error, which may absorb outliers:

    M <- shrink(x - deq(x)),   shrink(e) = sign(e) * relu(|e| - |e|^(p - 1) / beta),
    z <- mean(code - (x - M) / s),   code <- round(x / s + z).

In terms of an offset o = -s z the second line is o <- mean(x - M - s * code). The scale stays that of minimum and
maximum. The published code returns the last zero-point and stops for a whole tensor at once; this implementation keeps
the best iterate of each group by the l_p norm of its error. A symmetric grid has no zero-point; there the same step
updates the scale: s <- <c, x - M> / <c, c> for centred codes c.

The shrinkage depends on the unit of the weights: for the usual |e| < 0.05 with beta = 10 it absorbs nothing (M = 0),
and the offset is a plain mean. The published solver behaves the same way, and this implementation serves as that
baseline.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.affine import Fit, GroupSpec, assign, round_to_nearest, stored

__all__ = ["HalfQuadratic"]


@dataclass(frozen=True)
class HalfQuadratic:
    """The solver.

    Attributes:
        norm: p of the norm, 0 < p < 1.
        beta: initial weight of the quadratic term.
        growth: factor on beta after each iteration.
        iterations: number of iterations.
    """

    norm: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    iterations: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.norm < 1 or self.beta <= 0 or self.growth < 1 or self.iterations < 0:
            raise ValueError(f"invalid settings: {self}")

    def __call__(self, x: Tensor, spec: GroupSpec, start: Fit | None = None) -> Fit:
        """Fit groups x [N, g]; `start` is ignored, because the scale is always that of the group's range."""
        fit = best = round_to_nearest(x, spec)
        least: Tensor | None = None
        beta = self.beta
        for iteration in range(self.iterations + 1):
            error = x - torch.addcmul(fit.offsets, fit.codes, fit.scales)
            norm = error.abs().pow_(self.norm).sum(1, keepdim=True)
            better = torch.ones_like(norm, dtype=torch.bool) if least is None else norm < least
            pairs = ((fit.codes, best.codes), (fit.scales, best.scales), (fit.offsets, best.offsets))
            best = Fit(*(torch.where(better, new, old) for new, old in pairs))
            least = norm if least is None else torch.minimum(norm, least)
            if iteration < self.iterations:
                fit = _move(x, x - self._shrink(error, beta), fit, spec)
                beta *= self.growth
        return best

    def _shrink(self, error: Tensor, beta: float) -> Tensor:
        """Equation 7; a zero error stays zero, because its power would be infinite."""
        size = error.abs()
        return torch.where(size > 0, error.sign() * (size - size.pow(self.norm - 1) / beta).clamp_(min=0), 0.0)


def _move(x: Tensor, target: Tensor, fit: Fit, spec: GroupSpec) -> Fit:
    """Equation 8 and the rounding of equation 9; on symmetric grids, update the scale."""
    if not spec.symmetric:
        offsets = stored((target - fit.codes * fit.scales).mean(1, keepdim=True), spec.storage)
        return assign(x, fit.scales, offsets, spec)
    codes = fit.codes - spec.middle
    spread = codes.square().sum(1, keepdim=True)
    scales = torch.where(spread > 0, (codes * target).sum(1, keepdim=True) / spread, fit.scales)
    scales = stored(scales, spec.storage)
    return assign(x, scales, scales * -spec.middle, spec)
