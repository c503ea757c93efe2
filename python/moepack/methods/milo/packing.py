"""Packs compensated matrices into one tensor, and computes its size.

A tensor without compensators is stored as a plain group-wise tensor, so rank 0 costs no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack import _core
from moepack.methods.base import PackedBytes, Shape
from moepack.solvers.affine import AffineCodes, GroupSpec
from moepack.solvers.low_rank import PackedFactors

__all__ = ["FACTOR_GROUP", "Assembly", "base_bytes", "factor_bytes", "pack", "packed_bytes"]

FACTOR_GROUP = 64
"""Values of a factor that share a scale in the packed format."""


def base_bytes(shape: Shape, spec: GroupSpec) -> int:
    """Return the size of the group-wise tensor in bytes."""
    return _core.packed_bytes("groupwise", shape, **_specification(spec))


def factor_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes of one rank of a compensator, computed from 64 ranks, whose sections need no padding."""
    none, many = (_compensated((1, rows, columns), _ANY, rank, bits) for rank in (0, 64))
    return (many - none) // 64


def packed_bytes(shape: Shape, spec: GroupSpec, total_rank: int, bits: int) -> int:
    """Return the size in bytes of a tensor whose experts' ranks sum to `total_rank`."""
    return _compensated(shape, spec, total_rank, bits) if total_rank else base_bytes(shape, spec)


_ANY = GroupSpec(bits=4, group_size=64)


def _compensated(shape: Shape, spec: GroupSpec, total_rank: int, bits: int) -> int:
    ranks = {"rank_bits": bits, "total_rank": total_rank}
    return _core.packed_bytes("compensated", shape, **_specification(spec), **ranks)


def _specification(spec: GroupSpec) -> dict[str, Any]:
    return {"bits": spec.bits, "group_size": spec.group_size, "symmetric": spec.symmetric}


class Assembly:
    """Collects the experts of one tensor, in any order."""

    def __init__(self, shape: Shape, spec: GroupSpec, ranks: Sequence[int], bits: int) -> None:
        experts, rows, columns = shape
        self.starts = np.concatenate([[0], np.cumsum(ranks, dtype=np.int64)])
        groups = spec.groups(columns)
        self.codes = torch.zeros(shape, dtype=torch.uint8)
        self.scales = torch.zeros(experts, rows, groups)
        self.offsets = torch.zeros(experts, rows, 0 if spec.symmetric else groups)
        self.right = _Side(int(self.starts[-1]), columns, bits)
        self.left = _Side(int(self.starts[-1]), rows, bits)

    def put(self, experts: Sequence[int], codes: AffineCodes, factors: PackedFactors) -> None:
        """Store a batch of experts of equal rank."""
        for position, expert in enumerate(experts):
            self.codes[expert] = codes.codes[position]
            self.scales[expert] = codes.scales[position]
            if self.offsets.numel() and codes.offsets is not None:
                self.offsets[expert] = codes.offsets[position]
            rows = slice(int(self.starts[expert]), int(self.starts[expert + 1]))
            self.right.put(rows, factors.right, position)
            self.left.put(rows, factors.left, position)

    def parts(self) -> dict[str, Tensor]:
        """Return the arguments of `pack`."""
        found = {"codes": self.codes, "scales": self.scales, "offsets": self.offsets}
        for name, side in ("right", self.right), ("left", self.left):
            found |= {name: side.codes, f"{name}_scales": side.scales, f"{name}_values": side.values}
        return found


def pack(parts: Mapping[str, Tensor], spec: GroupSpec, ranks: Sequence[int], bits: int, ndim: int) -> PackedBytes:
    """Pack the parts that an `Assembly` collected."""
    arrays = {name: part.numpy() for name, part in parts.items()}
    base = _core.encode_groupwise(
        arrays["codes"],
        arrays["scales"],
        None if spec.symmetric else arrays["offsets"],
        bits=spec.bits,
        group_size=spec.group_size,
        ndim=ndim,
        dtype=str(spec.storage).removeprefix("torch."),
    )
    details = _core.PackedTensor(base).details()
    if not any(ranks):
        return PackedBytes("groupwise", base, details)
    right, left = (
        arrays[f"{side}_values"] if bits == 16 else (arrays[side], arrays[f"{side}_scales"])
        for side in ("right", "left")
    )
    data = _core.encode_compensated(base, np.asarray(ranks, np.int64), right, left, bits=bits)
    return PackedBytes("compensated", data, {**details, "rank_bits": bits})


class _Side:
    """The rows of one factor of all experts: codes and scales, or values at 16 bits."""

    def __init__(self, rows: int, length: int, bits: int) -> None:
        integers = bits != 16
        self.codes = torch.zeros(rows, length if integers else 0, dtype=torch.uint8)
        self.scales = torch.zeros(rows, -(-length // FACTOR_GROUP) if integers else 0)
        self.values = torch.zeros(rows, 0 if integers else length)

    def put(self, rows: slice, factor: AffineCodes | Tensor, position: int) -> None:
        """Store an expert's factor."""
        if isinstance(factor, Tensor):
            self.values[rows] = factor[position].float()
            return
        self.codes[rows] = factor.codes[position]
        self.scales[rows] = factor.scales[position]
