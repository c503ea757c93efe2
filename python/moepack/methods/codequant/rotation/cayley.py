"""Orthogonal matrices, random or learned (CodeQuant, section 3.1).

R = R0 (I - S)(I + S)^-1, where S is the skew-symmetric part of a free matrix M (equation 2). R0 is the starting point,
because M = 0 gives the identity. M follows the gradient of the squared error of rounded activations, |X R - Q(X R)|^2
(equation 3), through the straight-through estimator: codes are treated as constants, steps and zero points are not, so
the gradient is that of the token's range. (I + S) is factorized once per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.solvers.activations import round_activations

__all__ = ["ORTHOGONAL", "Learned", "is_orthogonal", "learn", "rounding_error", "start"]

ORTHOGONAL = 1e-4
"""Tolerance of |R^T R - I| for orthogonal matrices; float32 at 8,192 columns stays below 1e-5."""

TOKENS = 2048
"""Tokens per step."""


@dataclass(frozen=True)
class Learned:
    """A rotation and its rounding errors on held-out tokens.

    Attributes:
        rotation: [H, H] float32, orthogonal.
        errors: mean squared rounding error of held-out activations over their mean square: unrotated, with the starting
            matrix, and with this rotation.
    """

    rotation: Tensor
    errors: tuple[float, float, float]


def is_orthogonal(matrix: Tensor) -> bool:
    """Return whether a matrix is square, finite and orthogonal up to `ORTHOGONAL`."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not bool(matrix.isfinite().all()):
        return False
    product = matrix.double().T @ matrix.double()
    return bool(
        (product - torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)).abs().amax() <= ORTHOGONAL
    )


def start(width: int, kind: str, seed: int = 0) -> Tensor:
    """Return an initial orthogonal matrix [H, H] float32.

    Args:
        width: H.
        kind: "random", or "hadamard": Sylvester's matrix of the largest power of two that divides H, with random signs,
            times a random orthogonal matrix of the odd factor.
        seed: seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> Tensor:
        gaussian = torch.randn(size, size, dtype=torch.float64, generator=generator)
        q, r = torch.linalg.qr(gaussian)
        found: Tensor = q * r.diagonal().sign()
        return found.contiguous()

    if kind == "random":
        return random(width).float()
    if kind != "hadamard":
        raise ValueError(f"a rotation must start as random or hadamard, not '{kind}'")
    even = width & -width
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < even:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix) / 2**0.5
    signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    return (signs[:, None] * torch.kron(matrix, random(width // even))).float()


def rounding_error(x: Tensor, bits: int) -> float:
    """Return the mean squared error of rounded tokens [n, H] over their mean square."""
    return float(
        (round_activations(x, bits) - x).double().square().mean() / x.double().square().mean().clamp(min=1e-30)
    )


def learn(
    states: Tensor, bits: int, first: Tensor, steps: int, rate: float = 0.05, seed: int = 0, device: str = "cpu"
) -> Learned:
    """Learn a rotation.

    Args:
        states: [n, H] float32, activations to rotate; an eighth of them is held out.
        bits: bits of the rounded activations; 16 learns for 4.
        first: [H, H], the starting matrix.
        steps: number of Adam steps.
        rate: learning rate.
        seed: seed of the choice of tokens.
        device: where steps run.

    Returns:
        The matrix with the least error on held-out tokens, which may be the starting matrix.
    """
    bits = 4 if bits == 16 else bits
    generator = torch.Generator().manual_seed(seed)
    states = states[torch.randperm(len(states), generator=generator)].to(device)
    first = first.to(device)
    held, seen = states[: max(1, len(states) // 8)], states[len(states) // 8 :]
    identity = torch.eye(len(first), device=device)
    free = torch.zeros_like(first, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=rate / len(first) ** 0.5)
    best, before = first, rounding_error(held @ first, bits)
    least = before
    for step in range(steps):
        rotation = first @ _cayley(free, identity)
        batch = seen[torch.randint(len(seen), (min(TOKENS, len(seen)),), generator=generator).to(device)]
        optimizer.zero_grad()
        _straight_through(batch @ rotation, bits).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 16 == 15 or step == steps - 1:
            with torch.no_grad():
                tried = first @ _cayley(free, identity)
                error = rounding_error(held @ tried, bits)
            if error < least and is_orthogonal(tried):
                best, least = tried.detach().clone(), error
    return Learned(best.cpu(), (rounding_error(held, bits), before, least))


def _cayley(free: Tensor, identity: Tensor) -> Tensor:
    skew = (free - free.T) / 2
    # (I - S)(I + S)^-1: the factors commute, so the inverse can be applied from the left.
    solution: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    return solution


def _straight_through(x: Tensor, bits: int) -> Tensor:
    """Return the mean squared rounding error; its gradient passes through the steps and treats codes as constants."""
    top = float((1 << bits) - 1)
    # Not aminmax: some supported torch versions cannot differentiate it.
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high.clamp(min=0) - low.clamp(max=0)) / top).clamp(min=1e-12)
    codes = ((x / step).round() - x / step).detach()
    return (codes * step).square().mean()
