"""Low-rank compensators: the best matrix of a given rank, and its quantized factors.

`truncated_svd` returns the truncated U S V of a batch of matrices. It is exact (an eigendecomposition of the smaller
Gram matrix in float64) if the smaller side is at most 512. Otherwise it uses subspace iteration from a seeded random
start with oversampling (Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1). The random numbers are drawn on the
CPU, so every device starts from the same ones. `decompose` also returns the subspace, from which a slightly changed
matrix can be decomposed with two products with thin matrices instead of six.

Factors are quantized on symmetric grids with searched signed scales, in groups along the long side: a group lies within
one singular vector, whose entries are similar. Rounding both factors independently leaves the error of both;
alternately refitting one to the other, rounded one reduces it (`quantize_factors`). The error of factors L, R follows
from the product that the next refit needs anyway, ||E||^2 - 2 <L, R E^T> + <L L^T, R R^T>, so no full-size product is
formed; it is accurate to about 1e-7 of ||E||^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.affine import AffineCodes, GroupSpec, quantize_affine
from moepack.solvers.least_squares import LeastSquares

__all__ = [
    "EXACT_SIDE",
    "Factors",
    "PackedFactors",
    "decompose",
    "measured_error",
    "quantize_factors",
    "truncated_svd",
]

EXACT_SIDE = 512
"""Largest smaller side that is decomposed exactly: 20 ms per matrix at 512."""
_OVERSAMPLING = 16
_POWER_ITERATIONS = 2
_WARM_SHARE = 3
"""Up to a subspace width of the smaller side divided by this, iterating from a start is cheaper than exact
decomposition."""
_RIDGE = 0.64
"""Damping of the normal equations of a refit, relative to their diagonal, in units of the squared step 4^-bits. Rounded
factors of nearly full rank are ill-conditioned, and the gain of an exact solution is lost when it is rounded."""


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
        """Return the matrices, [E, R, C]."""
        return self.left.mT @ self.right


@dataclass(frozen=True)
class PackedFactors:
    """Factors as stored.

    Attributes:
        left: codes of U^T [E, r, R]; a float16 tensor for 16 bits.
        right: codes of V [E, r, C], likewise.
    """

    left: AffineCodes | Tensor
    right: AffineCodes | Tensor

    def factors(self) -> Factors:
        """Return the dequantized factors."""
        return Factors(_values(self.left), _values(self.right))


def truncated_svd(matrices: Tensor, rank: int, *, seed: int = 0) -> Factors:
    """Return the closest matrices of rank `rank` in the Frobenius norm (MiLo, equations 11 and 12).

    Args:
        matrices: [E, R, C] float32, finite.
        rank: 0 to min(R, C).
        seed: seed of the random start.

    Returns:
        Both factors carry the square roots of the singular values. The largest component of each singular vector is
        positive in the right factor, so the result is unique if singular values differ.

    Raises:
        ValueError: the rank is out of range.
    """
    return decompose(matrices, rank, seed=seed)[0]


def decompose(
    matrices: Tensor, rank: int, *, start: Tensor | None = None, seed: int = 0
) -> tuple[Factors, Tensor | None]:
    """Decompose matrices like `truncated_svd`, and return the subspace of the factors.

    Args:
        matrices, rank, seed: see :func:`truncated_svd`.
        start: [E, w, C], the subspace of similar matrices, from which one iteration continues.

    Returns:
        The factors, and the subspace, [E, w, C]; None if the next decomposition should be exact, too.
    """
    experts, rows, columns = matrices.shape
    if not 0 <= rank <= min(rows, columns):
        raise ValueError(f"rank {rank} of matrices of {rows} x {columns}")
    if not rank or not experts:
        return Factors(matrices.new_zeros((experts, rank, rows)), matrices.new_zeros((experts, rank, columns))), None
    side, width = min(rows, columns), min(rank + _OVERSAMPLING, rows, columns)
    if start is None and side <= EXACT_SIDE:
        # The additional vectors serve later iterations.
        kept = width if width <= side // _WARM_SHARE else rank
        left, values, right = _exact(matrices, kept)
    else:
        kept = width
        left, values, right = _randomised(matrices, width, start, seed)
    space = right.float() if kept > rank else None
    left, values, right = left[:, :rank], values[:, :rank], right[:, :rank]
    signs = right.gather(2, right.abs().argmax(2, keepdim=True)).sign()
    root = values.clamp(min=0).sqrt()[..., None] * torch.where(signs == 0, 1.0, signs)
    return Factors((left * root).float(), (right * root).float()), space


def _exact(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading left vectors [E, r, R], singular values [E, r] and right vectors [E, r, C], float64."""
    if matrices.shape[1] < matrices.shape[2]:
        right, values, left = _exact(matrices.mT, rank)
        return left, values, right
    wide = matrices.double()
    _, vectors = torch.linalg.eigh(wide.mT @ wide)
    right = vectors[..., -rank:].flip(-1).mT
    images = right @ wide.mT
    values = images.norm(dim=2)
    return images / values.clamp(min=torch.finfo(torch.float64).tiny)[..., None], values, right


def _randomised(matrices: Tensor, width: int, start: Tensor | None, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return leading vectors and singular values like `_exact`, in a subspace of `width`.

    The subspace is found by iteration from a random one, or is `start`.
    """
    experts, _, columns = matrices.shape
    if start is None:
        generator = torch.Generator().manual_seed(seed)
        probe = torch.randn(columns, width, generator=generator).to(matrices.device).expand(experts, -1, -1)
    else:
        probe = start.mT
    basis = torch.linalg.qr(matrices @ probe).Q
    for _ in range(_POWER_ITERATIONS if start is None else 0):
        basis = torch.linalg.qr(matrices @ torch.linalg.qr(matrices.mT @ basis).Q).Q
    inner, values, right = _exact(basis.mT @ matrices, width)
    return inner @ basis.mT.double(), values, right


def quantize_factors(
    target: Tensor, factors: Factors, bits: int, group_size: int, *, refits: int = 1, name: str | None = None
) -> tuple[PackedFactors, Tensor]:
    """Quantize the factors of an approximation of `target`.

    Args:
        target: [E, R, C] float32, the matrices to approximate.
        factors: its truncated decomposition.
        bits: 3 or 8 (or any of the group-wise widths) for integers, 16 for float16.
        group_size: group size of the integers, along R and along C.
        refits: how often each factor is refitted to the other one as stored; 0 rounds both directly. For each matrix,
            the turn with the least error is kept.
        name: the tensor's name, for errors.

    Returns:
        The factors, and their change of the squared error, see :func:`measured_error`.

    Raises:
        InvalidTensorError: a factor is out of range of float16.
    """
    if bits == 16 or not factors.rank:
        rounded = PackedFactors(*(_pack(side, bits, group_size, name) for side in (factors.left, factors.right)))
        return rounded, measured_error(target, rounded.factors())
    ridge = _RIDGE * 4.0**-bits
    best: PackedFactors | None = None
    least, left, right = target.new_zeros(0), factors.left, _pack(factors.right, bits, group_size, name)

    def offer(left: AffineCodes | Tensor, right: AffineCodes | Tensor, error: Tensor) -> None:
        nonlocal best, least
        new = PackedFactors(left, right)
        best, least = (new, error) if best is None else (_choose(error < least, new, best), torch.minimum(error, least))

    for turn in range(refits + 1):
        values = _values(right)
        image = values @ target.mT
        packed = _pack(_solved(values, image, ridge) if refits else left, bits, group_size, name)
        left = _values(packed)
        offer(packed, right, _error(left, values, image))
        if turn < refits:
            image = left @ target
            right = _pack(_solved(left, image, ridge), bits, group_size, name)
            offer(packed, right, _error(_values(right), left, image))
    assert best is not None
    return best, least


def measured_error(target: Tensor, factors: Factors) -> Tensor:
    """Return the change of the squared error of a target [E, R, C]: `||target - product||^2 - ||target||^2`.

    Returns:
        [E] float64, negative if the factors help.
    """
    return _error(factors.left, factors.right, factors.right @ target.mT)


def _error(one: Tensor, other: Tensor, image: Tensor) -> Tensor:
    """Return the change of the squared error, [E] float64, by factors [E, r, n] and [E, r, m].

    `image` is the other factor's product with the target, [E, r, n].
    """
    explained = (one * image).sum(2).double().sum(1)
    return ((one @ one.mT) * (other @ other.mT)).double().sum((1, 2)) - 2 * explained


def _choose(better: Tensor, new: PackedFactors, old: PackedFactors) -> PackedFactors:
    """Choose matrix by matrix, [E] bool."""

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


def _solved(other: Tensor, image: Tensor, damping: float) -> Tensor:
    """Return the factor [E, r, C] whose product with other^T [E, R, r] is closest to a target.

    Solves (other other^T + ridge) x = image, where image [E, r, C] = other target. Zero rows of `other` give zero rows.
    """
    gram = other @ other.mT
    ridge = damping * gram.diagonal(dim1=1, dim2=2).amax(1)
    eye = torch.eye(gram.shape[1], device=gram.device)
    gram = gram + torch.where(ridge > 0, ridge, 1.0)[:, None, None] * eye
    return torch.cholesky_solve(image, torch.linalg.cholesky(gram))
