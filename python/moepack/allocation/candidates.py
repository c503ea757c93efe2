"""What may be stored of one tensor: the candidates that methods propose and `moepack.allocation.budget` chooses among.

A method proposes a *set* of candidates that exclude one another (formats, grids, group sizes). A candidate may bring
*chains* of further steps (the ranks of each expert's compensator). What is only known by solving is proposed as a curve
of bits over prices instead (`moepack.allocation.price`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Candidate", "Chain", "Counts", "Numbers"]

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
S = TypeVar("S")


@dataclass(frozen=True)
class Chain:
    """Steps that are taken in order, each of which needs all before it.

    Attributes:
        costs: [n] bytes that each step adds, positive.
        gains: [n] what each step takes off the expected loss.
    """

    costs: Counts
    gains: Numbers

    @property
    def prices(self) -> Numbers:
        """What each step pays for a byte; no more than those before it, or it could not be bought in order."""
        return np.minimum.accumulate(self.gains / self.costs)


@dataclass(frozen=True)
class Candidate(Generic[S]):
    """One way to store a tensor.

    Attributes:
        format: kind of the packed tensor, such as `groupwise`.
        specification: what its method needs to make it.
        nbytes: size with all metadata, without the steps of its chains.
        loss: expected rise of the loss (`moepack.allocation.importance`), without the steps of its chains.
        chains: steps that may be added, in any number from the first of each.
    """

    format: str
    specification: S
    nbytes: int
    loss: float
    chains: Sequence[Chain] = ()
