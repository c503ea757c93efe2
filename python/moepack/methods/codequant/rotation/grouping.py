"""Permutation-invariant outlier grouping: which columns share a codebook (CodeQuant, section 3.3 and appendix A.2).

A block-wise codebook covers adjacent columns, so their order matters. The order of a feed-forward block's inner
dimension is free: rows of gate and up projections and columns of the down projection move together. Algorithm 1 sorts
columns by mean magnitude and cuts them into subgroups. It gives each block the subgroup with the largest remaining
spread, and fills the block with those of the smallest spread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["SUBGROUP", "Grouping", "group_columns"]

SUBGROUP = 16
"""Columns that move together. The paper publishes no size."""


def group_columns(weights: Tensor, block: int, subgroup: int = SUBGROUP) -> Tensor:
    """Return the column order of algorithm 1.

    Args:
        weights: [..., R, C], floating point.
        block: columns that share a codebook, a multiple of `subgroup`.
        subgroup: columns that move together.

    Returns:
        [..., C] int64: position j takes column `order[j]`. The natural order if one block holds all columns.

    Raises:
        ValueError: `block` is not a multiple of `subgroup`.
    """
    if block % subgroup:
        raise ValueError(f"a block of {block} columns is not a multiple of subgroups of {subgroup}")
    columns = weights.shape[-1]
    natural = torch.arange(columns).expand(*weights.shape[:-2], columns)
    if columns <= block:
        return natural
    if weights.ndim > 2:
        return torch.stack([group_columns(matrix, block, subgroup) for matrix in weights])
    values = weights.float()
    sorted_columns = torch.argsort(values.abs().mean(0), descending=True, stable=True)
    whole = columns // subgroup * subgroup
    parts = sorted_columns[:whole].view(-1, subgroup)
    spread = values[:, parts].std(-1).mean(0)
    by_spread = torch.argsort(spread, descending=True, stable=True).tolist()
    order: list[int] = []
    while by_spread:
        order.append(by_spread.pop(0))
        for _ in range(min(block // subgroup - 1, len(by_spread))):
            order.append(by_spread.pop())
    return torch.cat([parts[order].flatten(), sorted_columns[whole:]])


_MATRIX = re.compile(
    r"(?P<base>.+\.(?:mlp|experts|experts\.\d+|shared_experts)\.)"
    r"(?P<leaf>gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3)(?P<end>(?:\.weight)?)"
)
_DOWN = {"gate_proj": "down_proj", "up_proj": "down_proj", "gate_up_proj": "down_proj", "w1": "w2", "w3": "w2"}


class Grouping:
    """Feed-forward matrices with their inner dimension in the order of `group_columns`, computed tensor by tensor."""

    def __init__(self, tensor: Callable[[str], Tensor], block: int) -> None:
        """`tensor` returns matrices by name; `block` columns share a codebook."""
        self._given, self.block = tensor, block
        self._order = lru_cache(maxsize=4096)(self._find)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with reordered rows or columns if it belongs to a feed-forward block, otherwise unchanged."""
        given = self._given(name)
        match = _MATRIX.fullmatch(name)
        if match is None:
            return given
        leaf = match["leaf"]
        order = self._order(f"{match['base']}{_DOWN.get(leaf, leaf)}{match['end']}")
        if leaf not in _DOWN:
            return given.gather(-1, order.unsqueeze(-2).expand_as(given))
        if leaf == "gate_up_proj":
            order = torch.cat([order, order + order.shape[-1]], -1)
        return given.gather(-2, order.unsqueeze(-1).expand_as(given))

    def _find(self, down: str) -> Tensor:
        return group_columns(self._given(down), self.block)
