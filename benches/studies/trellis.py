"""Measures the squared error of dependent codes relative to plain ones at equal bits. Takes seconds.

    python -m benches.studies.trellis

Weights are Gaussian and Laplace. The share of the weights' length that is kept (values projected on weights) is in
parentheses. Both kinds are rounded as by `rate` without a text, and coded; the step of dependent codes is the one at
which they take the same bytes.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moepack.methods.rate.step_size import encoded
from moepack.solvers.priced import Profile, round_priced, scale_of, worth_of

STEPS = (1.6, 1.0, 0.5, 0.25)
"""Over the root mean square of the weights."""

ROUNDS = 6
"""Tries for a step: a step about twice as large takes a bit less."""


def rounded(weights: Tensor, profile: Profile, step: float, dependent: bool) -> tuple[Tensor, float]:
    """Values [R, C] and the bits per weight."""
    worth = worth_of(dependent)
    lengths = profile.lengths(step, worth, dependent)
    codes = round_priced(weights, step, lengths, worth)
    blob = encoded(codes[None], lengths.largest, dependent)
    return codes * scale_of(step, dependent), 8 * blob.nbytes / weights.numel()


def alike(weights: Tensor, profile: Profile, step: float, bits: float) -> Tensor:
    """Values of dependent codes with the given bits; the search starts at a step."""
    for _ in range(ROUNDS):
        values, own = rounded(weights, profile, step, dependent=True)
        step *= 2.0 ** (own - bits)
    return values


def measures(weights: Tensor, values: Tensor) -> tuple[float, float]:
    """The mean squared error, and the kept share of the weights' length."""
    return float((weights - values).square().mean()), float((weights * values).sum() / weights.square().sum())


def main() -> None:
    """Compare on sources of unit variance."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = (512, 1024)
    sources = {"Gaussian": torch.randn(shape), "Laplace": torch.distributions.Laplace(0.0, 0.5**0.5).sample(shape)}
    print("| source, bits | plain | dependent |\n|---|---|---|")
    for (name, weights), step in itertools.product(sources.items(), STEPS):
        profile = Profile()
        profile.add(weights, 1.0)
        plain, bits = rounded(weights, profile, step, dependent=False)
        (error, kept), (own, own_kept) = (
            measures(weights, plain),
            measures(weights, alike(weights, profile, step, bits)),
        )
        print(f"| {name}, {bits:.2f} | 1 ({kept:.3f}) | {own / error:.3f} ({own_kept:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
