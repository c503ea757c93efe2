"""Which tensors keep offsets where bytes are short: a choice of grid for each tensor under one price of a byte.

At a price p a tensor is worth its weighted error plus p times its bytes, with the ranks that are worth their price; of
its grids the one of the least sum is taken. Bytes fall as the price rises, so bisection finds the least price that the
budget can pay (Everett 1963: what Lagrange multipliers find is optimal for the bytes that it takes). The ranks
themselves are then filled in exactly (:func:`moepack.methods.milo.ranks.fill_budget`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moepack.methods.milo.ranks import Numbers

__all__ = ["Option", "choose_grids"]

_HALVINGS = 60


@dataclass(frozen=True)
class Option:
    """One grid of one tensor.

    Attributes:
        nbytes: without compensators.
        error: the weighted error of all its matrices without compensators.
        falls: [E, n], by how much each step of a matrix's rank reduces it.
        cost: bytes of a step of one matrix.
    """

    nbytes: int
    error: float
    falls: Numbers
    cost: int

    def at(self, price: float) -> tuple[float, float]:
        """The error and the bytes with every step that is worth its price."""
        bought = self.falls > price * self.cost
        return self.error - float(self.falls[bought].sum()), self.nbytes + self.cost * float(bought.sum())


def choose_grids(tensors: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """The grid of each tensor.

    Args:
        tensors: the options of each.
        budget: bytes of everything; the smallest options fit.

    Returns:
        The number of the option of each tensor. Where even the highest price pays for more, the smallest options.
    """
    # No step is worth more than the largest fall a byte, and no option more than all of the error for one byte.
    high = 1 + max((option.error for options in tensors for option in options), default=0.0)
    low, best = high * 2.0**-_HALVINGS, [_smallest(options) for options in tensors]
    for _ in range(_HALVINGS):
        price = (low * high) ** 0.5
        chosen = [_cheapest(options, price) for options in tensors]
        spent = sum(options[choice].at(price)[1] for options, choice in zip(tensors, chosen, strict=True))
        if spent <= budget:
            high, best = price, chosen
        else:
            low = price
    return best


def _smallest(options: Sequence[Option]) -> int:
    return int(np.argmin([option.nbytes for option in options]))


def _cheapest(options: Sequence[Option], price: float) -> int:
    return int(np.argmin([error + price * nbytes for error, nbytes in (option.at(price) for option in options)]))
