"""Low-rank compensators: the best matrix of a given rank, and its factors quantized.

`truncated_svd` gives U S V of a batch of matrices by rank: exact (an eigendecomposition of the smaller Gram matrix in
float64) where the smaller side is at most 512, else by subspace iteration from a seeded random start with oversampling
(Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1). The random numbers are drawn on the CPU, so every device
starts from the same ones.

Factors are quantized on symmetric grids with searched signed scales, in groups along the long side: a group lies within
one singular vector, whose entries are alike. Both factors rounded independently leave the error of both; refitting one
to the rounded other, alternately, spends what freedom is left (`quantize_factors`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.affine import AffineCodes, GroupSpec, quantize_affine
from moepack.solvers.least_squares import LeastSquares

__all__ = ["EXACT_SIDE", "Factors", "PackedFactors", "quantize_factors", "truncated_svd"]

EXACT_SIDE = 512
"""Largest smaller side that is decomposed exactly: 20 ms a matrix at 512."""
_OVERSAMPLING = 16
_POWER_ITERATIONS = 2
_WARM_SHARE = 3
"""Up to this part of the smaller side, iterating from a start is cheaper than an exact decomposition."""
_RIDGE = 0.64
"""Damping of the normal equations of a refit, relative to their diagonal, in units of the squared step 4^-bits: rounded
factors of nearly full rank are ill-conditioned, and what an exact solution gains there is lost when it is rounded."""


@dataclass(frozen=True)
class Factors:
    """A batch of matrices of rank r as `left^T right`.

    Attributes:
        left: [E, r, R] float32, the transpose of U.
        right: [E, r, C] float32, V.
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.left.shape[1]

    def product(self) -> Tensor:
        """The matrices, [E, R, C]."""
        return self.left.mT @ self.right


@dataclass(frozen=True)
class PackedFactors:
    """Factors as they are stored.

    Attributes:
        left: codes of U^T [E, r, R]; for 16 bits a float16 tensor.
        right: codes of V [E, r, C], or likewise.
    """

    left: AffineCodes | Tensor
    right: AffineCodes | Tensor

    def factors(self) -> Factors:
        """The values that a reader sees."""
        return Factors(_values(self.left), _values(self.right))


def truncated_svd(matrices: Tensor, rank: int, *, start: Tensor | None = None, seed: int = 0) -> Factors:
    """The closest matrices of rank `rank` in the Frobenius norm (MiLo, equations 11 and 12).

    Args:
        matrices: [E, R, C] float32, finite.
        rank: 0 to min(R, C).
        start: [E, r, C], rows that roughly span the leading right singular vectors: subspace iteration goes on from
            them, where the rank is a small part of the matrix's own, and spares a power iteration where it is iterated
            anyway.
        seed: of the random start.

    Returns:
        Both factors carry the square roots of the singular values. Singular vectors have their largest component
        positive in the right factor, so that the result is unique where singular values differ.

    Raises:
        ValueError: the rank is out of range.
    """
    experts, rows, columns = matrices.shape
    if not 0 <= rank <= min(rows, columns):
        raise ValueError(f"rank {rank} of matrices of {rows} x {columns}")
    if not rank or not experts:
        return Factors(matrices.new_zeros((experts, rank, rows)), matrices.new_zeros((experts, rank, columns)))
    side = min(rows, columns)
    if side <= EXACT_SIDE and (start is None or rank + _OVERSAMPLING > side // _WARM_SHARE):
        left, values, right = _exact(matrices, rank)
    else:
        left, values, right = _randomised(matrices, rank, start, seed)
    signs = right.gather(2, right.abs().argmax(2, keepdim=True)).sign()
    root = values.clamp(min=0).sqrt()[..., None] * torch.where(signs == 0, 1.0, signs)
    return Factors((left * root).float(), (right * root).float())


def _exact(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors [E, r, R], singular values [E, r] and right vectors [E, r, C] of the leading part, float64."""
    if matrices.shape[1] < matrices.shape[2]:
        right, values, left = _exact(matrices.mT, rank)
        return left, values, right
    wide = matrices.double()
    _, vectors = torch.linalg.eigh(wide.mT @ wide)
    right = vectors[..., -rank:].flip(-1).mT
    images = right @ wide.mT
    values = images.norm(dim=2)
    return images / values.clamp(min=torch.finfo(torch.float64).tiny)[..., None], values, right


def _randomised(matrices: Tensor, rank: int, start: Tensor | None, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    experts, rows, columns = matrices.shape
    width = min(rank + _OVERSAMPLING, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    if start is None:
        probe = torch.randn(columns, width, generator=generator).to(matrices.device).expand(experts, -1, -1)
        powers = _POWER_ITERATIONS
    else:
        extra = torch.randn(columns, max(width - start.shape[1], 0), generator=generator).to(matrices.device)
        size = start.norm(dim=2, keepdim=True).mT
        probe = torch.cat([start.mT / torch.where(size > 0, size, 1.0), extra.expand(experts, -1, -1)], 2)
        powers = 1
    basis = torch.linalg.qr(matrices @ probe).Q
    for _ in range(powers):
        basis = torch.linalg.qr(matrices @ torch.linalg.qr(matrices.mT @ basis).Q).Q
    inner, values, right = _exact(basis.mT @ matrices, rank)
    return inner @ basis.mT.double(), values, right


def quantize_factors(
    target: Tensor, factors: Factors, bits: int, group_size: int, *, refits: int = 1, name: str | None = None
) -> PackedFactors:
    """Quantize the factors of an approximation of `target`.

    Args:
        target: [E, R, C] float32, what the product shall be close to.
        factors: its truncated decomposition.
        bits: 3 or 8 (or any of the group-wise widths) for integers, 16 for float16.
        group_size: of the integers, along R and along C.
        refits: how often each factor is fitted again to the other one as it is stored; 0 rounds both as they are. Of
            all turns, that of the least error is kept for each matrix.
        name: of the tensor, for errors.

    Raises:
        InvalidTensorError: a factor is beyond the range of float16.
    """
    if bits == 16 or not factors.rank:
        refits = 0
    left, right, ridge = factors.left, factors.right, _RIDGE * 4.0**-bits
    best: PackedFactors | None = None
    least: Tensor | None = None
    for _ in range(refits + 1):
        packed_right = _pack(right, bits, group_size, name)
        if refits:
            left = _refit(target.mT, _values(packed_right), ridge)
        packed = PackedFactors(_pack(left, bits, group_size, name), packed_right)
        error = (target - packed.factors().product()).square().sum((1, 2))
        best = packed if best is None or least is None else _choose(error < least, packed, best)
        least = error if least is None else torch.minimum(error, least)
        if refits:
            right = _refit(target, _values(packed.left), ridge)
    assert best is not None
    return best


def _choose(better: Tensor, new: PackedFactors, old: PackedFactors) -> PackedFactors:
    """Matrix by matrix, [E] bool."""

    def pick(a: AffineCodes | Tensor, b: AffineCodes | Tensor) -> AffineCodes | Tensor:
        where = better[:, None, None]
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            assert isinstance(a, Tensor) and isinstance(b, Tensor)
            return torch.where(where, a, b)
        return AffineCodes(a.spec, torch.where(where, a.codes, b.codes), torch.where(where, a.scales, b.scales), None)

    return PackedFactors(pick(new.left, old.left), pick(new.right, old.right))


def _pack(values: Tensor, bits: int, group_size: int, name: str | None) -> AffineCodes | Tensor:
    if bits == 16:
        return values.half()
    return quantize_affine(values, GroupSpec(bits, group_size, symmetric=True), LeastSquares(), name=name)


def _values(stored: AffineCodes | Tensor) -> Tensor:
    return stored.float() if isinstance(stored, Tensor) else stored.values()


def _refit(target: Tensor, other: Tensor, damping: float) -> Tensor:
    """The factor [E, r, C] whose product with other^T [E, R, r] is closest to the target [E, R, C].

    Solves (other other^T + ridge) x = other target. Zero rows of `other` give zero rows.
    """
    gram = other @ other.mT
    ridge = damping * gram.diagonal(dim1=1, dim2=2).amax(1)
    eye = torch.eye(gram.shape[1], device=gram.device)
    gram = gram + torch.where(ridge > 0, ridge, 1.0)[:, None, None] * eye
    return torch.cholesky_solve(other @ target, torch.linalg.cholesky(gram))
