"""Compensated matrices as one packed tensor, and what that costs.

A tensor without any compensator is a plain group-wise tensor, so rank 0 costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack import _core
from moepack.methods.base import Shape
from moepack.solvers.affine import AffineCodes, GroupSpec
from moepack.solvers.low_rank import PackedFactors

__all__ = ["FACTOR_GROUP", "Assembly", "base_bytes", "factor_bytes", "packed_bytes"]

FACTOR_GROUP = 64
"""Values of a factor that share a scale in the packed format."""


def base_bytes(shape: Shape, spec: GroupSpec) -> int:
    """Size of the group-wise tensor."""
    return _core.packed_bytes("groupwise", shape, **_specification(spec))


def factor_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of one rank of a compensator: what 64 of them, whose sections need no padding, add to none."""
    none, many = (_compensated((1, rows, columns), _ANY, rank, bits) for rank in (0, 64))
    return (many - none) // 64


def packed_bytes(shape: Shape, spec: GroupSpec, total_rank: int, bits: int) -> int:
    """Size of a tensor whose experts' ranks sum to `total_rank`."""
    return _compensated(shape, spec, total_rank, bits) if total_rank else base_bytes(shape, spec)


_ANY = GroupSpec(bits=4, group_size=64)


def _compensated(shape: Shape, spec: GroupSpec, total_rank: int, bits: int) -> int:
    ranks = {"rank_bits": bits, "total_rank": total_rank}
    return _core.packed_bytes("compensated", shape, **_specification(spec), **ranks)


def _specification(spec: GroupSpec) -> dict[str, Any]:
    return {"bits": spec.bits, "group_size": spec.group_size, "symmetric": spec.symmetric}


class Assembly:
    """Collects the experts of one tensor, in any order, and packs them."""

    def __init__(self, shape: Shape, spec: GroupSpec, ranks: Sequence[int], bits: int, ndim: int) -> None:
        experts, rows, columns = shape
        self.spec, self.bits, self.ndim = spec, bits, ndim
        self.ranks = np.asarray(ranks, np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.ranks)])
        groups = spec.groups(columns)
        self.codes = np.zeros(shape, np.uint8)
        self.scales = np.zeros((experts, rows, groups), np.float32)
        self.offsets = None if spec.symmetric else np.zeros((experts, rows, groups), np.float32)
        self.right = _Side(int(self.starts[-1]), columns, bits)
        self.left = _Side(int(self.starts[-1]), rows, bits)

    def put(self, experts: Sequence[int], codes: AffineCodes, factors: PackedFactors) -> None:
        """Take over a batch of experts of one rank."""
        for position, expert in enumerate(experts):
            self.codes[expert] = codes.codes[position].cpu().numpy()
            self.scales[expert] = codes.scales[position].cpu().numpy()
            if self.offsets is not None and codes.offsets is not None:
                self.offsets[expert] = codes.offsets[position].cpu().numpy()
            rows = slice(int(self.starts[expert]), int(self.starts[expert + 1]))
            self.right.put(rows, factors.right, position)
            self.left.put(rows, factors.left, position)

    def pack(self) -> tuple[str, npt.NDArray[np.uint8], dict[str, Any]]:
        """Kind, bytes and details of the packed tensor."""
        base = _core.encode_groupwise(
            self.codes,
            self.scales,
            self.offsets,
            bits=self.spec.bits,
            group_size=self.spec.group_size,
            ndim=self.ndim,
            dtype=str(self.spec.storage).removeprefix("torch."),
        )
        details = _core.PackedTensor(base).details()
        if not self.ranks.any():
            return "groupwise", base, details
        details["rank_bits"] = self.bits
        blob = _core.encode_compensated(base, self.ranks, self.right.rows(), self.left.rows(), bits=self.bits)
        return "compensated", blob, details


class _Side:
    """The rows of one factor of all experts: codes and scales, or values at 16 bits."""

    def __init__(self, rows: int, length: int, bits: int) -> None:
        integers = self.integers = bits != 16
        self.codes = np.zeros((rows, length if integers else 0), np.uint8)
        self.scales = np.zeros((rows, -(-length // FACTOR_GROUP) if integers else 0), np.float32)
        self.values = np.zeros((rows, 0 if integers else length), np.float32)

    def rows(self) -> Any:
        """All rows as the core takes them."""
        return (self.codes, self.scales) if self.integers else self.values

    def put(self, rows: slice, factor: AffineCodes | Tensor, position: int) -> None:
        """Store an expert's factor."""
        if isinstance(factor, torch.Tensor):
            self.values[rows] = factor[position].float().cpu().numpy()
            return
        self.codes[rows] = factor.codes[position].cpu().numpy()
        self.scales[rows] = factor.scales[position].cpu().numpy()
