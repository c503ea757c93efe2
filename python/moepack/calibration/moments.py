"""Second moments of an expert's inputs, weighted by the effect of each token on the model's output.

A squared error of an expert's output enters the hidden state times the squared router weight. An error of a first
projection's output reaches it through the activation and the last projection: for output r of projection p by (d h_r /
d p_r)^2 |W_r|^2, where h are the inputs of the last projection and W_r is the column of its weights that reads h_r. The
mean over r and p is the token's weight, so that one Hessian serves all first projections. Errors of different
projections, experts and tokens then have the same unit, and bits can go where they save most.

The drift is the moment between a token's inputs and their deviation from the original model's: the sum of a (x' - x)^T
x. Its regression on the inputs gives the part of the earlier layers' error that this layer could undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.products import fast_products, filled

__all__ = ["Gram", "Moments", "Tokens", "expert_moments", "sensitivity"]

BLOCK = 512
"""Columns of a block of a symmetric product: a sum over 2048 columns computes 5/8 of it."""


@dataclass(frozen=True)
class Tokens:
    """A piece of an expert's tokens, as read by one of its projections.

    Attributes:
        inputs: [n, C], from the compressed model.
        originals: [n, C], from the original model; the same tensor if there is no other model.
        weights: [n], weight of a squared output error of the projection.
    """

    inputs: Tensor
    originals: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Moments:
    """Sums over an expert group's tokens: hessians of a x^T x and drift of a (x' - x)^T x, [G, C, C] float32.

    `drift` is None if it was not requested.
    """

    hessians: Tensor
    drift: Tensor | None = None


def expert_moments(
    groups: Sequence[Iterable[Tokens]], columns: int, device: torch.device, drift: bool = True
) -> Moments:
    """Sum the pieces of each expert."""
    hessians = torch.zeros(len(groups), columns, columns, device=device)
    drifts = torch.zeros_like(hessians) if drift else None
    for position, pieces in enumerate(groups):
        gram = Gram(columns, device)
        for piece in pieces:
            # The square root of the weight on both sides keeps the sum symmetric in any precision.
            x, root = piece.inputs.float(), piece.weights.float().sqrt()[:, None]
            work = len(x) * columns * min(columns, BLOCK)
            gram.add(scaled := filled(x * root, work))
            if drifts is not None and piece.originals is not piece.inputs:
                strayed = filled((piece.originals.float() - x).mul_(root), work)
                with fast_products(work):
                    drifts[position].addmm_(strayed.T, scaled)
        gram.write(hessians[position])
    return Moments(hessians, drifts)


class Gram:
    """A sum of x^T x; computes the blocks on and below the diagonal only, which saves up to half of the products."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Start a sum of matrices of `columns` columns."""
        starts = range(0, columns, BLOCK)
        self._places = [(first, min(first + BLOCK, columns)) for first in starts]
        self._sums = [torch.zeros(columns - first, last - first, device=device) for first, last in self._places]

    def add(self, x: Tensor) -> None:
        """Add x^T x for x [n, C] float32."""
        work = x.numel() * min(x.shape[1], BLOCK)
        x = filled(x, work)
        with fast_products(work):
            for (first, last), total in zip(self._places, self._sums, strict=True):
                total.addmm_(x[:, first:].T, x[:, first:last])

    def write(self, out: Tensor) -> None:
        """Write the sum to `out`, [C, C] float32."""
        for (first, last), total in zip(self._places, self._sums, strict=True):
            out[first:, first:last] = total
            out[first:last, last:] = total[last - first :].T


def sensitivity(parts: Sequence[Tensor], activate: Callable[[Sequence[Tensor]], Tensor], last: Tensor) -> Tensor:
    """Return the weight of a squared error of the first projections' outputs in the expert's output, [n] float32.

    Args:
        parts: outputs [n, I] of the first projections.
        activate: computes the inputs [n, I] of the last projection from them, elementwise.
        last: weights [R, I] of the last projection.
    """
    with torch.enable_grad():
        leaves = [part.detach().float().requires_grad_() for part in parts]
        slopes = torch.autograd.grad(activate(leaves).sum(), leaves)
    gains = last.float().square().sum(0)
    return torch.stack([slope.square() @ gains for slope in slopes]).mean(0) / max(len(gains), 1)
