"""The budget solver: chooses one candidate per tensor, and the number of steps of its chains, within a number of bytes.

Every set of candidates starts with its cheapest one and moves along the lower convex hull of loss over bytes. The steps
of all sets are bought in order of decreasing price of a byte (Everett 1963: what one price buys is optimal for the
bytes that it takes). A set whose candidates have no chains advances as far as its steps are bought. If candidates have
chains, the price of the first step that does not fit decides the candidate, because its steps exclude those of the
others; then the chains' own steps are bought one by one. So the loss exceeds the minimum by at most that step's price
times the remaining bytes.

Steps of equal price have a fixed order, which makes the output deterministic: the earlier step of its chain first, then
the earlier chain. Steps without gain are never bought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic

import numpy as np

from moepack.allocation.candidates import Candidate, Chain, Counts, S

__all__ = ["Choice", "Steps", "allocate", "hull"]

_TRIALS = 12
"""Maximum number of budgets tried by bisection; the stored size then comes within 1/4000 of the bytes available to
steps."""


@dataclass(frozen=True)
class Choice(Generic[S]):
    """The choice for a tensor: a candidate, and the number of steps of each of its chains."""

    candidate: Candidate[S]
    steps: Counts


def allocate(
    tensors: Sequence[Sequence[Candidate[S]]],
    budget: int,
    size: Callable[[Sequence[Choice[S]]], int] = lambda _: 0,
) -> list[Choice[S]]:
    """Choose for all tensors so that the total loss is small and the bytes are within the budget.

    Args:
        tensors: the candidates of each tensor.
        budget: maximum size in bytes.
        size: returns the stored size of choices in bytes, if padding makes it larger than the sum of candidates and
            steps.

    Raises:
        ValueError: the smallest candidates exceed the budget, or a tensor has none.
    """
    hulls = [hull(candidates) for candidates in tensors]
    least = sum(along[0].nbytes for along, _ in hulls)
    if least > budget:
        raise ValueError(f"the smallest candidates take {least:,} bytes, but the budget is {budget:,}")
    decided = Steps([chain for _, chain in hulls]).above(budget - least).tolist()
    starts = [_Start.of(*found, at) for found, at in zip(hulls, decided, strict=True)]
    steps = Steps([chain for start in starts for chain in start.chains])
    ends = np.cumsum([0, *(len(start.chains) for start in starts)]).tolist()

    def choices(offer: int) -> list[Choice[S]]:
        counts = steps.within(offer)
        return [start.choice(counts[first:end]) for start, (first, end) in zip(starts, pairwise(ends), strict=True)]

    low, high = 0, budget - sum(start.along[0].nbytes for start in starts)
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


@dataclass(frozen=True)
class _Start(Generic[S]):
    """A tensor's starting point: candidates along one chain, or one candidate with its own chains."""

    along: Sequence[Candidate[S]]
    chains: Sequence[Chain]

    @classmethod
    def of(cls, along: Sequence[Candidate[S]], chain: Chain, decided: int) -> _Start[S]:
        """Return the start of a set for which the price chose the hull point `decided`."""
        if any(candidate.chains for candidate in along):
            along = [along[decided]]
        return cls(along, [chain] if len(along) > 1 else along[0].chains)

    def choice(self, steps: Counts) -> Choice[S]:
        """Return the choice after the given numbers of steps."""
        return Choice(self.along[0], steps) if len(self.along) == 1 else Choice(self.along[steps[0]], steps[:0])


def hull(candidates: Sequence[Candidate[S]]) -> tuple[list[Candidate[S]], Chain]:
    """Return the lower convex hull of a set, including the best steps of each candidate's chains.

    Returns:
        The candidate at each point (of equal ones the first) in order of increasing bytes, and the chain of steps
        between the points.
    """
    if not candidates:
        raise ValueError("a tensor has no candidates")
    steps = [Steps(candidate.chains) if candidate.chains else _NONE for candidate in candidates]
    owners = np.repeat(np.arange(len(steps)), [1 + len(own.spent) for own in steps])
    nbytes = np.concatenate([np.append(0, own.spent) + c.nbytes for c, own in zip(candidates, steps, strict=True)])
    losses = np.concatenate([c.loss - np.append(0, own.gained) for c, own in zip(candidates, steps, strict=True)])
    order = np.lexsort((losses, nbytes))
    best = np.minimum.accumulate(losses[order])
    kept = order[np.append(True, losses[order][1:] < best[:-1])]
    while True:
        chain = Chain(np.diff(nbytes[kept]), -np.diff(losses[kept]))
        slopes = chain.gains / chain.costs
        # A point on or above the line between its neighbours is never a corner, even if neighbours are removed.
        corners = np.ones(len(kept), bool)
        corners[1:-1] = slopes[1:] < slopes[:-1]
        if corners.all():
            return [candidates[owner] for owner in owners[kept]], chain
        kept = kept[corners]


class Steps:
    """The steps of some chains in the order in which they are bought.

    Attributes:
        spent, gained: cumulative bytes and gains up to and including each step.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = len(chains)
        lengths = np.array([len(chain.gains) for chain in chains], np.int64)
        owners = np.repeat(np.arange(len(chains)), lengths)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        prices = np.concatenate([np.empty(0), *(chain.prices for chain in chains)])
        order = np.lexsort((owners, places, -prices))
        order = order[prices[order] > 0]
        self._owners, self._prices = owners[order], prices[order]
        self._costs = np.concatenate([np.empty(0, np.int64), *(chain.costs for chain in chains)])[order]
        self.spent = np.cumsum(self._costs)
        self.gained = np.cumsum(np.concatenate([np.empty(0), *(chain.gains for chain in chains)])[order])

    def above(self, budget: int) -> Counts:
        """Return how many steps of each chain have a higher price than the first step that exceeds a budget."""
        first = self._fitting(budget)
        price = self._prices[first] if first < len(self._prices) else 0.0
        return self._counts(int(np.searchsorted(-self._prices, -price)))

    def within(self, budget: int) -> Counts:
        """Return how many steps of each chain a budget buys.

        A step that does not fit ends its chain, others may still fit.
        """
        first = self._fitting(budget)
        counts, ended = self._counts(first), np.zeros(self._chains, bool)
        left = budget - int(self.spent[first - 1]) if first else budget
        least = int(self._costs.min(initial=budget + 1))
        while first < len(self._costs) and least <= left:
            owner, cost = self._owners[first], int(self._costs[first])
            if cost > left:
                ended[owner] = True
            elif not ended[owner]:
                left -= cost
                counts[owner] += 1
            first += 1
        return counts

    def _fitting(self, budget: int) -> int:
        return int(np.searchsorted(self.spent, budget, side="right"))

    def _counts(self, bought: int) -> Counts:
        return np.bincount(self._owners[:bought], minlength=self._chains).astype(np.int64)


_NONE = Steps(())
"""The steps of a candidate without chains."""
