"""Streaming quantiles of magnitudes in constant memory: the empirical distribution F of FloE's equation 6.

Magnitudes are counted by the exponent and the first eight mantissa bits of their float32, so a threshold is at most
0.4 % above the quantile for any distribution.
"""

import torch
from torch import Tensor

__all__ = ["Quantiles"]

_DROPPED = 15
"""Ignored low bits of the mantissa."""
_LOWEST = (127 - 48) << 8
"""The key of 2^-48; smaller magnitudes count as zero."""
_KEYS = 80 << 8
"""Number of keys, up to 2^32."""


class Quantiles:
    """Magnitude histograms of some experts.

    Attributes:
        counts: number of values by key, [E, keys] int64.
    """

    def __init__(self, experts: int) -> None:
        self.counts = torch.zeros(experts, _KEYS, dtype=torch.int64)

    def add(self, expert: int, values: Tensor) -> None:
        """Count the magnitudes of finite values of any shape."""
        keys = (values.abs().float().view(torch.int32) >> _DROPPED).sub_(_LOWEST).clamp_(0, _KEYS - 1)
        self.counts[expert] += torch.bincount(keys.flatten().long().cpu(), minlength=_KEYS)

    @property
    def total(self) -> Tensor:
        """Number of values of each expert, [E] int64."""
        return self.counts.sum(1)

    def threshold(self, share: float, experts: slice | int = slice(None)) -> float:
        """Return the smallest key edge below which at least `share` of the values of some experts lie.

        A share of 0, or no values, gives zero, which everything passes. A share of 1 gives infinity, which nothing
        passes.
        """
        counts = self.counts[experts].view(-1, _KEYS).sum(0)
        if share <= 0 or not int(counts.sum()):
            return 0.0
        if share >= 1:
            return float("inf")
        below = counts.cumsum(0).double() / int(counts.sum())
        return _edge(int(torch.searchsorted(below, torch.tensor(share, dtype=torch.float64))) + 1)

    def below(self, expert: int, threshold: float) -> float | None:
        """Return the share of an expert's values below a result of `threshold`; None without values."""
        if not (total := int(self.counts[expert].sum())):
            return None
        edges = torch.tensor([_edge(key) for key in range(_KEYS)], dtype=torch.float64)
        return int(self.counts[expert][edges < threshold].sum()) / total


def _edge(key: int) -> float:
    """Return the smallest magnitude of a key; zero for the first key."""
    return float(torch.tensor(key + _LOWEST << _DROPPED, dtype=torch.int32).view(torch.float32)) if key else 0.0
