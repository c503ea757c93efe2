"""Chains of steps that cost bytes and lower the loss, and the order in which a budget buys them.

A chain's steps are taken in order: step k needs all before it. What a step pays for a byte is its *price*, gain over
cost; a step pays no more than those before it, or it could not be bought in order. Steps of all chains are bought by
falling price. Ties have one order, which fixes the bytes of packed models: the earlier step of its chain first, then
the earlier chain. Steps that gain nothing are never bought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Chain", "Counts", "Numbers", "Steps"]

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """What one item offers, step by step.

    Attributes:
        costs: [n] bytes that each step adds, positive.
        gains: [n] what each step takes off the expected loss.
    """

    costs: Counts
    gains: Numbers

    @property
    def prices(self) -> Numbers:
        """What each step pays for a byte, never rising."""
        return np.minimum.accumulate(self.gains / self.costs)


class Steps:
    """The steps of some chains in the order in which they are bought.

    Attributes:
        costs, gains: of each step.
        spent: bytes of all steps up to and with each.
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
        self.costs = np.concatenate([np.empty(0, np.int64), *(chain.costs for chain in chains)])[order]
        self.gains = np.concatenate([np.empty(0), *(chain.gains for chain in chains)])[order]
        self.spent = np.cumsum(self.costs)

    def price(self, budget: int) -> float:
        """The price of the first step that does not fit into a budget; 0 if all fit."""
        first = self._fitting(budget)
        return float(self._prices[first]) if first < len(self._prices) else 0.0

    def above(self, price: float) -> Counts:
        """How many steps of each chain pay more than a price."""
        return self._counts(int(np.searchsorted(-self._prices, -price)))

    def within(self, budget: int) -> Counts:
        """How many steps of each chain a budget buys.

        A step that does not fit ends its chain; cheaper ones that fit are still bought elsewhere. No other choice gains
        more than this and the price of the first step that did not fit for every byte left before it.
        """
        first = self._fitting(budget)
        counts, ended = self._counts(first), np.zeros(self._chains, bool)
        left = budget - int(self.spent[first - 1]) if first else budget
        least = int(self.costs.min(initial=budget + 1))
        while first < len(self.costs) and least <= left:
            owner, cost = self._owners[first], int(self.costs[first])
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
