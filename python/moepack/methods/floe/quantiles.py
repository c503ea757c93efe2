"""Quantiles of magnitudes that stream by, in constant memory: the empirical distribution F of FloE's equation 6.

A magnitude is counted by the exponent and the first eight bits of the mantissa of its float32, so a threshold is at
most 0.4 % above the quantile, whatever the distribution.
"""

import torch
from torch import Tensor

__all__ = ["Quantiles"]

_DROPPED = 15
"""Bits of the mantissa that are not looked at."""
_LOWEST = (127 - 48) << 8
"""The key of 2^-48: what is smaller counts as zero."""
_KEYS = 80 << 8
"""Keys up to 2^32."""


class Quantiles:
    """Magnitudes of some experts.

    Attributes:
        counts: [E, keys] int64.
    """

    def __init__(self, experts: int) -> None:
        self.counts = torch.zeros(experts, _KEYS, dtype=torch.int64)

    def add(self, expert: int, values: Tensor) -> None:
        """Count the magnitudes of finite values of any shape."""
        keys = (values.abs().float().view(torch.int32) >> _DROPPED).sub_(_LOWEST).clamp_(0, _KEYS - 1)
        self.counts[expert] += torch.bincount(keys.flatten().long().cpu(), minlength=_KEYS)

    @property
    def total(self) -> Tensor:
        """How many values each expert has, [E] int64."""
        return self.counts.sum(1)

    def threshold(self, share: float, experts: slice | int = slice(None)) -> float:
        """The smallest edge of a key below which at least `share` of the values of some experts lie.

        Zero for a share of 0 or without values, infinity for a share of 1: everything and nothing passes.
        """
        counts = self.counts[experts].view(-1, _KEYS).sum(0)
        if share <= 0 or not int(counts.sum()):
            return 0.0
        if share >= 1:
            return float("inf")
        below = counts.cumsum(0).double() / int(counts.sum())
        return _edge(int(torch.searchsorted(below, torch.tensor(share, dtype=torch.float64))) + 1)

    def below(self, expert: int, threshold: float) -> float | None:
        """The share of an expert's values that are smaller than a threshold of `threshold`; None without values."""
        if not (total := int(self.counts[expert].sum())):
            return None
        edges = torch.tensor([_edge(key) for key in range(_KEYS)], dtype=torch.float64)
        return int(self.counts[expert][edges < threshold].sum()) / total


def _edge(key: int) -> float:
    """The smallest magnitude of a key; zero of the first."""
    return float(torch.tensor(key + _LOWEST << _DROPPED, dtype=torch.int32).view(torch.float32)) if key else 0.0
