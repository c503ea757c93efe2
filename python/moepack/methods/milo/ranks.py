"""Rank policies (MiLo, section 3.2.5), given as a spec such as `dense:512+kurtosis:16`.

| policy | applies to | rank |
|---|---|---|
| `uniform:r` | every matrix | r |
| `dense:r` | attention, shared experts, dense feed-forward layers | r |
| `sparse:r` | experts | r |
| `kurtosis:r` | experts | r on average, increasing with the kurtosis of the weights |
| `frequency:r` | experts | r on average, proportional to how often the router chooses the expert |
| `budget:p` | every matrix | p percent more bytes than without compensators, spent where the error decreases most |

Terms add up; `budget` cannot be combined. Ranks are multiples of 16 (of 8 in models whose matrices are smaller than
512) and never exceed the smaller side of their matrix. If r is not a multiple, neighbouring multiples are mixed so that
the mean over the matrices is r, to within one multiple over all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moepack.allocation.candidates import Counts, Numbers

__all__ = ["Term", "named_ranks", "parse_ranks", "rank_step"]

NAMED = ("uniform", "dense", "sparse", "kurtosis", "frequency")
_SMALL_SIDE = 512
_TERM = re.compile(r"([a-z]+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Term:
    """One term of a spec: a policy and its rank, or the percentage for `budget`."""

    policy: str
    amount: float


def parse_ranks(spec: str) -> tuple[Term, ...]:
    """Parse a spec.

    Raises:
        ValueError: the spec is invalid; the message describes the syntax.
    """
    terms = []
    for part in spec.split("+"):
        match = _TERM.fullmatch(part.strip())
        if match is None or match[1] not in (*NAMED, "budget") or (match[1] != "budget" and "." in match[2]):
            policies = ", ".join((*NAMED, "budget"))
            raise ValueError(f"rank '{spec}' is not a sum of POLICY:NUMBER terms; policies: {policies}")
        terms.append(Term(match[1], float(match[2])))
    if len(terms) > 1 and any(term.policy == "budget" for term in terms):
        raise ValueError(f"rank '{spec}': budget cannot be combined with other policies")
    return tuple(terms)


def rank_step(sides: Counts) -> int:
    """Return the granularity of ranks, given the smaller sides of all matrices."""
    return 8 if sides.max(initial=0) < _SMALL_SIDE else 16


def named_ranks(
    terms: Sequence[Term], sides: Counts, dense: npt.NDArray[np.bool_], kurtosis: Numbers, frequency: Numbers | None
) -> Counts:
    """Return ranks by named policies.

    Args:
        terms: the terms to add.
        sides: the smaller side of every matrix of the model, in a fixed order.
        dense: whether every token passes through the matrix.
        kurtosis: kurtosis of each matrix.
        frequency: share of its layer's tokens for which each matrix is chosen; None if unknown.

    Returns:
        [M] ranks.

    Raises:
        ValueError: a policy needs `frequency`, but it is unknown.
    """
    step = rank_step(sides)
    most = sides // step * step
    ranks = np.zeros_like(most)
    for term in terms:
        chosen = {"uniform": dense | ~dense, "dense": dense}.get(term.policy, ~dense)
        if term.policy == "kurtosis":
            order = np.empty(int(chosen.sum()))
            order[np.argsort(kurtosis[chosen], kind="stable")] = np.arange(len(order)) + 0.5
            found = _share(order, term.amount, most[chosen], step)
        elif term.policy == "frequency":
            if frequency is None:
                raise ValueError("rank by frequency requires a calibration text: set calibration")
            found = _share(frequency[chosen], term.amount, most[chosen], step)
        else:
            found = np.minimum(_spread(int(chosen.sum()), int(term.amount), step), most[chosen])
        ranks[chosen] += found
    return np.minimum(ranks, most)


def _spread(count: int, rank: int, step: int) -> Counts:
    """Return `count` multiples of `step` with mean `rank`; larger and smaller ones alternate evenly."""
    edges = np.arange(count + 1, dtype=np.int64) * rank // step
    return np.diff(edges) * step


def _share(scores: Numbers, mean: float, most: Counts, step: int) -> Counts:
    """Return multiples of `step` proportional to scores, none above `most`, with the given mean if possible.

    What a capped matrix cannot take goes to the others, again proportionally. The last units go to the largest
    remainders, with ties broken by order.
    """
    units = np.zeros(len(scores))
    caps = most / step
    left = min(int(mean * len(scores)) // step, int(caps.sum()))
    open_ = caps > 0
    while left - units.sum() > 1e-9 and open_.any():
        weights = np.where(open_, np.maximum(scores, 0), 0)
        weights = weights if weights.sum() > 0 else open_.astype(float)
        units = np.minimum(units + (left - units.sum()) * weights / weights.sum(), caps)
        open_ &= units < caps - 1e-9
    whole = np.floor(units + 1e-9)
    rest = np.where(whole < caps, units - whole, -1)
    order = np.argsort(-rest, kind="stable")
    whole[order[: left - int(whole.sum())]] += 1
    return (whole * step).astype(np.int64)
