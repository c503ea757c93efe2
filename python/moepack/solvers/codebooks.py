"""Codebooks that preserve a matrix's outputs: weighted k-means, then alternation (CodeQuant, section 3.2).

The objective is that of equation 5, |X W - X~ Wc|^2, where X are the inputs in the original model and X~ those in the
compressed one. With H = X~^T X~ and D = (X - X~)^T X~, both damped, its unconstrained minimizer is the *target* W +
share W D H^-1 (`moepack.solvers.drift`), and the objective is (Wc - T) H (Wc - T)^T up to a constant. So only the
target depends on both X and X~, and every step works on one quadratic form (`moepack._core.refine_codebooks`):

1. Start: exact k-means of each row or block; a column's weight is its entry of diag H.
2. Alternate assignments and closed-form centroids. Assignments either visit the columns one by one given all others,
after a first round with error feedback; or follow equation 8: the centroid nearest to D2_jj / D1_jj w_ij, with D1 =
diag H and D2 = diag(H + D).

Each row keeps its best iterate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moepack import _core
from moepack.errors import InvalidTensorError
from moepack.solvers.drift import corrected
from moepack.solvers.fixed_point import fixed_point, split_blocks
from moepack.solvers.gptq import Factors, damped, factorize
from moepack.solvers.kmeans import kmeans, uniform

__all__ = ["ClusterSettings", "Clustered", "cluster", "look_up"]


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of the codebook search.

    Attributes:
        bits: bits per code: 2, 3 or 4, that is 4, 8 or 16 centroids.
        block: columns that share a codebook; None for the whole row. The last block of a row may be shorter.
        steps: number of improvements of assignments and centroids; 0 keeps the k-means result.
        assignment: "columns" or "diagonal" (equation 8).
        weighted: weight columns by diag H in k-means; False weights them equally.
        damping: added to the diagonal of H, relative to its mean.
        drift: the fraction of the way from the weights to the target, 0 to 1.
        centroid_bits: bits to which centroids are rounded: 16, or 8 for products in the mode "int8".
        start: "kmeans", or "uniform" for evenly spaced centroids from each row's or block's minimum to its maximum
            (with 0 steps: rounding to nearest).
    """

    bits: int = 4
    block: int | None = None
    steps: int = 4
    assignment: Literal["columns", "diagonal"] = "columns"
    weighted: bool = True
    damping: float = 0.05
    drift: float = 0.0
    centroid_bits: int = 16
    start: Literal["kmeans", "uniform"] = "kmeans"

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ValueError(f"bits must be 2, 3 or 4, not {self.bits}")
        if self.steps < 0:
            raise ValueError(f"steps must be 0 or more, not {self.steps}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"a block must have at least one column, not {self.block}")
        if self.start not in ("kmeans", "uniform"):
            raise ValueError(f"start must be kmeans or uniform, not '{self.start}'")
        if self.assignment not in ("columns", "diagonal"):
            raise ValueError(f"assignment must be columns or diagonal, not '{self.assignment}'")
        if not (math.isfinite(self.damping) and self.damping > 0):
            raise ValueError(f"damping must be positive, not {self.damping}")
        if not 0 <= self.drift <= 1:
            raise ValueError(f"drift must be 0 to 1, not {self.drift}")


class Clustered(NamedTuple):
    """The result of `cluster`.

    Attributes:
        codes: [E, R, C] uint8.
        centroids: [E, R, B, K] float32, exactly as a packed tensor stores them.
        objectives: [E, steps + 1] float64: the output error before the first step and after each, relative to the
            output energy of the target.
        reasons: for each expert, why its inputs were not used, or None.
    """

    codes: Tensor
    centroids: Tensor
    objectives: Tensor
    reasons: list[str | None]


def cluster(weights: Tensor, hessians: Tensor, drift: Tensor, settings: ClusterSettings) -> Clustered:
    """Find codes and codebooks of a batch of matrices.

    Args:
        weights: [E, R, C], finite.
        hessians: H of each expert, [E, C, C], up to a positive factor. If it is unusable (no token, NaN), every column
            has equal weight.
        drift: D of each expert, [E, C, C], up to the same factor; zeros if there is only one model.
        settings: see `ClusterSettings`.

    Raises:
        InvalidTensorError: a weight is NaN or infinite.
    """
    if not bool(torch.isfinite(weights).all()):
        raise InvalidTensorError("weights hold NaN or infinite values")
    weights, hessians, drift = (tensor.float().cpu() for tensor in (weights, hessians, drift))
    factors = factorize(hessians, settings.damping)
    metric = damped(hessians, factors.damping, factors.reasons)
    target = corrected(weights, hessians, drift, settings.drift, settings.damping, factors)
    importance = metric.diagonal(dim1=1, dim2=2) if settings.weighted else torch.ones_like(metric[:, 0])
    parts = zip(split_blocks(target, settings.block), split_blocks(importance, settings.block), strict=True)
    if settings.start == "uniform":
        books = [uniform(part, 1 << settings.bits) for part, _ in parts]
    else:
        books = [kmeans(part, 1 << settings.bits, share.contiguous()) for part, share in parts]
    start = torch.cat([book.codes for book in books], -1), torch.stack([book.centroids for book in books], -2)
    points = None
    if settings.assignment == "diagonal":
        points = weights * _ratio(hessians, drift, factors)[:, None]
    codes, centroids, objectives = _refine(target, metric, start, factors.upper, points, settings)
    stored = fixed_point(centroids, settings.centroid_bits).values()
    energy = torch.einsum("erc,ecd,erd->e", target, metric, target).double().clamp(min=1e-30)
    return Clustered(codes, stored, objectives.sum(1) / energy[:, None], factors.reasons)


def look_up(codes: Tensor, centroids: Tensor, block: int | None) -> Tensor:
    """Return the values [..., R, C] of codes [..., R, C] with centroids [..., R, B, K]."""
    parts = split_blocks(codes, block)
    return torch.cat([torch.gather(centroids[..., i, :], -1, part.long()) for i, part in enumerate(parts)], -1)


def _ratio(hessians: Tensor, drift: Tensor, factors: Factors) -> Tensor:
    """Return D2 / D1 of equation 8, [E, C]; 1 for unexcited columns and unusable Hessians."""
    before, moved = hessians.diagonal(dim1=1, dim2=2), drift.diagonal(dim1=1, dim2=2)
    ratio = 1 + moved / before
    usable = torch.tensor([reason is None for reason in factors.reasons])[:, None] & ratio.isfinite()
    return torch.where(usable, ratio, 1.0)


def _refine(
    target: Tensor,
    metric: Tensor,
    start: tuple[Tensor, Tensor],
    factors: Tensor,
    points: Tensor | None,
    settings: ClusterSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, centroids and objectives [E, R, steps + 1]."""
    codes, centroids = start
    found = _core.refine_codebooks(
        target.contiguous().numpy(), metric.contiguous().numpy(), codes.numpy(), centroids.contiguous().numpy(),
        block=settings.block or max(codes.shape[-1], 1), steps=settings.steps,
        factors=None if points is not None else factors.contiguous().numpy(),
        points=None if points is None else points.contiguous().numpy(),
    )  # fmt: skip
    new_codes, new_centroids, objectives = (torch.from_numpy(array) for array in found)
    return new_codes.view(codes.shape), new_centroids.view(centroids.shape), objectives
