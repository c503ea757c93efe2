"""The smallest argument at which a falling function fits a limit, found with few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["smallest_within"]


def smallest_within(
    function: Callable[[float], float], limit: float, low: float, high: float, exact: float, fall: float
) -> float:
    """Find the smallest argument in (low, high] whose value is at most a limit, by secants within a shrinking bracket.

    The arguments form an even grid of 2^n cells. The result is the one of a bisection if the function falls, but takes
    about half of its evaluations.

    Args:
        function: a function that falls in general.
        limit: the largest value allowed.
        low, high: the range. `high` is not evaluated; it is the result if no smaller argument fits.
        exact: maximum width of a cell.
        fall: approximate decrease of the function per unit of the argument, positive; the first step follows it.

    Returns:
        The right end of the last cell.
    """
    cells = 1 << max(math.ceil(math.log2((high - low) / exact)), 0)
    width = (high - low) / cells
    first, last, place = 0, cells, cells // 2
    before: tuple[int, float] | None = None
    evaluations, checked = 0, cells
    while last - first > 1:
        excess = function(low + width * place) - limit
        first, last = (place, last) if excess > 0 else (first, place)
        slope = -fall * width
        if before is not None and (before[1] - excess) * (before[0] - place) < 0:
            slope = (before[1] - excess) / (before[0] - place)
        before, evaluations = (place, excess), evaluations + 1
        target = place - excess / slope if slope and math.isfinite(excess) else math.nan
        shrinks = True
        if evaluations % 3 == 0:  # three evaluations must halve the bracket; otherwise the next one does
            shrinks, checked = 2 * (last - first) <= checked, last - first
        place = math.ceil(target) if shrinks and math.isfinite(target) else (first + last) // 2
        place = min(max(place, first + 1), last - 1)
    return low + width * last
