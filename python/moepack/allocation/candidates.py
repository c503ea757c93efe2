"""Candidates for storing one tensor, proposed by methods and chosen by `moepack.allocation.budget`.

A method proposes a *set* of mutually exclusive candidates (formats, grids, group sizes). A candidate may have *chains*
of further steps (the ranks of each expert's compensator). Sizes that are known only after solving are proposed as
curves of bits over prices instead (`moepack.allocation.price`).
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
    """Steps that are taken in order; each requires all before it.

    Attributes:
        costs: [n] bytes that each step adds, positive.
        gains: [n] reduction of the expected loss by each step.
    """

    costs: Counts
    gains: Numbers

    @property
    def prices(self) -> Numbers:
        """The gain per byte of each step, limited to those before it so that steps are bought in order."""
        return np.minimum.accumulate(self.gains / self.costs)


@dataclass(frozen=True)
class Candidate(Generic[S]):
    """One way to store a tensor.

    Attributes:
        format: kind of the packed tensor, such as `groupwise`.
        specification: parameters that the method needs to create it.
        nbytes: size including all metadata, without the steps of its chains.
        loss: expected loss increase (`moepack.allocation.importance`), without the steps of its chains.
        chains: optional steps, any number from the start of each.
    """

    format: str
    specification: S
    nbytes: int
    loss: float
    chains: Sequence[Chain] = ()
