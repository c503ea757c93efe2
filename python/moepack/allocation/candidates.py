"""What may be stored of one tensor, and the lower convex hull of loss over bytes that a budget walks along.

A method proposes a *set* of candidates that exclude one another (formats, grids, group sizes). A candidate may bring
*chains* of further steps (the ranks of each expert's compensator). The hull of all of it is one chain again.
Losses of everything that shares a budget are in one unit (`moepack.allocation.importance`); bytes count all metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from moepack.allocation.chains import Chain, Counts, Numbers, Steps

__all__ = ["Candidate", "hull"]

S = TypeVar("S")


@dataclass(frozen=True)
class Candidate(Generic[S]):
    """One way to store a tensor.

    Attributes:
        format: kind of the packed tensor, such as `groupwise`.
        specification: what its method needs to make it.
        nbytes: size, without the steps of its chains.
        loss: expected rise of the loss, without the steps of its chains.
        chains: steps that may be added, in any number from the first of each.
    """

    format: str
    specification: S
    nbytes: int
    loss: float
    chains: Sequence[Chain] = ()

    def curve(self) -> tuple[Counts, Numbers]:
        """Bytes and losses after 0, 1, 2, ... steps of its chains, the best first."""
        steps = Steps(self.chains)
        return (
            np.concatenate([[self.nbytes], self.nbytes + steps.spent]),
            np.concatenate([[self.loss], self.loss - np.cumsum(steps.gains)]),
        )


def hull(candidates: Sequence[Candidate[S]]) -> tuple[Counts, Chain]:
    """The lower convex hull of a set.

    Returns:
        For each point, from the least bytes on, the number of the candidate (of equal ones the first), and the chain of
        steps from point to point.

    Raises:
        ValueError: the set is empty.
    """
    if not candidates:
        raise ValueError("a tensor without candidates")
    curves = [candidate.curve() for candidate in candidates]
    owners = np.repeat(np.arange(len(curves)), [len(nbytes) for nbytes, _ in curves])
    nbytes, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    order = np.lexsort((losses, nbytes))
    best = np.minimum.accumulate(losses[order])
    kept = order[np.concatenate([[True], losses[order][1:] < best[:-1]])]
    while True:
        chain = Chain(np.diff(nbytes[kept]), -np.diff(losses[kept]))
        slopes = chain.gains / chain.costs
        # A point on or above the line between its neighbours is no corner, whatever becomes of the neighbours.
        corners = np.ones(len(kept), bool)
        corners[1:-1] = slopes[1:] < slopes[:-1]
        if corners.all():
            return owners[kept], chain
        kept = kept[corners]
