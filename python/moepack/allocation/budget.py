"""The budget solver: one candidate of each tensor, and how many steps of its chains, within a number of bytes.

Every set starts with its cheapest candidate and moves along its hull, the steps of all sets by falling price (Everett
1963: what one price buys is optimal for the bytes that it takes). A set whose candidates have no chains goes as far as
its steps are bought. Where candidates have chains, the price of the first step that does not fit decides the candidate,
for its steps exclude those of the others, and then the chain's own steps are bought one by one. So the loss exceeds
the least possible by no more than the bytes that one step left over were worth. Results depend on nothing but the order
of the tensors, and on that only between steps of equal price (`moepack.allocation.chains`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from moepack.allocation.candidates import Candidate, hull
from moepack.allocation.chains import Chain, Counts, Steps

__all__ = ["Choice", "allocate"]

S = TypeVar("S")

_TRIALS = 12
"""Budgets that are tried, by bisection, until bytes as stored come within a 4000th of what steps may take."""


@dataclass(frozen=True)
class Choice(Generic[S]):
    """What was chosen for a tensor: a candidate, and the number of steps of each of its chains."""

    candidate: Candidate[S]
    steps: Counts


def allocate(
    tensors: Sequence[Sequence[Candidate[S]]],
    budget: int,
    size: Callable[[Sequence[Choice[S]]], int] = lambda _: 0,
) -> list[Choice[S]]:
    """Choose for all tensors so that the sum of the losses is small and the bytes are within the budget.

    Args:
        tensors: the candidates of each.
        budget: bytes.
        size: bytes of choices as they are stored, where padding makes them more than the sum of candidates and steps.

    Raises:
        ValueError: the smallest candidates take more than the budget, or a tensor has none.
    """
    sets = [_Set(candidates) for candidates in tensors]
    least = sum(one.start.nbytes for one in sets)
    if least > budget:
        raise ValueError(f"the smallest candidates take {least:,} bytes, the budget is {budget:,}")
    steps = Steps([one.chain for one in sets])
    for one, at in zip(sets, steps.above(steps.price(budget - least)).tolist(), strict=True):
        one.settle(at)
    steps = Steps([chain for one in sets for chain in one.chains])
    ends = np.cumsum([0, *(len(one.chains) for one in sets)]).tolist()

    def choices(offer: int) -> list[Choice[S]]:
        counts = steps.within(offer)
        return [one.choice(counts[first:end]) for one, (first, end) in zip(sets, pairwise(ends), strict=True)]

    low, high = 0, budget - sum(one.start.nbytes for one in sets)
    offer, best = high, choices(0)
    for _ in range(_TRIALS):
        found = choices(offer)
        if size(found) <= budget:
            best, low = found, offer
        else:
            high = offer
        offer = (low + high) // 2
        if offer == low:
            break
    return best


class _Set(Generic[S]):
    """The candidates of a tensor while they are chosen from: where it starts, and the chains that lead on from there.

    A set without chains of its own is led along its hull.
    """

    def __init__(self, candidates: Sequence[Candidate[S]]) -> None:
        self.candidates = candidates
        self.points, self.chain = hull(candidates)
        self.refined = any(candidate.chains for candidate in candidates)
        self.start = candidates[self.points[0]]
        self.chains: Sequence[Chain] = [self.chain]

    def settle(self, point: int) -> None:
        """Keep the candidate at a point of the hull, if it has steps of its own."""
        if self.refined:
            self.start = self.candidates[self.points[point]]
            self.chains = self.start.chains

    def choice(self, steps: Counts) -> Choice[S]:
        """What so many steps of the chains lead to."""
        if self.refined:
            return Choice(self.start, steps)
        return Choice(self.candidates[self.points[steps[0]]], steps[:0])
