"""Stored forms of a projection: ternary rows, or two-bit groups.

A form defines the grid, the parameters besides the codes, and the packed bytes. Values are always computed from the
parameters *as stored*, so that calibration feeds the next block exactly what a reader of the packed file sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack import _core
from moepack.methods.base import PackedBytes, Shape
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.qmoe.ternary import Ternary
from moepack.solvers.grids import AffineGrid, TernaryGrid

__all__ = ["Form", "GroupwiseForm", "TernaryForm", "groupwise_details"]


class Form(Protocol):
    """One way to store a projection. Codes are [E, R, C], parameters [E, R, P]."""

    def grid(self) -> Any:
        """Return a fresh grid for the solver."""

    def parameters(self, grid: Any) -> Tensor:
        """Return the fitted grid's parameters."""

    def scaled(self, parameters: Tensor, factors: Tensor) -> Tensor:
        """Return parameters, rounded as stored, that multiply the values by `factors` [E, R]."""

    def values(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Return the float32 values of codes."""

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedBytes:
        """Pack a projection; both tensors must be on the CPU."""

    def bound(self, shape: Shape) -> int:
        """Return the maximum packed size of a projection in bytes."""


@dataclass(frozen=True)
class TernaryForm:
    """Entropy-coded ternary rows. Parameters are the two levels of a row, in bf16."""

    def grid(self) -> TernaryGrid:
        """Return the paper's grid: minimum, zero and maximum of each row."""
        return TernaryGrid()

    def parameters(self, grid: TernaryGrid) -> Tensor:
        """Return the levels (negative, positive)."""
        return grid.levels

    def scaled(self, parameters: Tensor, factors: Tensor) -> Tensor:
        """Scale the levels."""
        limit = torch.finfo(torch.bfloat16).max
        return (parameters * factors[..., None]).clamp(-limit, limit).bfloat16().float()

    def values(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Replace codes by levels."""
        low, high = parameters.unsqueeze(2).unbind(-1)
        return torch.where(codes > 0, high, torch.where(codes < 0, low, torch.zeros_like(low)))

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedBytes:
        """Encode the codes."""
        levels = parameters.numpy().astype(np.float32) + 0.0  # no negative zeros: opposite levels are stored once
        blob = _core.encode_ternary(
            codes.numpy(),
            levels,
            ndim=3,
        )
        return PackedBytes(
            "ternary", blob, {"code": "fsv8", "nonzeros": _core.PackedTensor(blob).details()["nonzeros"]}
        )

    def bound(self, shape: Shape) -> int:
        """Return the size if every row has the worst case of the code."""
        return Ternary().bound(shape)


@dataclass(frozen=True)
class GroupwiseForm:
    """Two bits per weight. Parameters are scale and offset of each group, in f16.

    Attributes:
        group_size: columns per group: 16, 32, 64, 128 or 256.
        static: compute the groups from the original weights (required by act-order).
        search: narrow each group's range to minimize the squared error.
    """

    group_size: int = 64
    static: bool = False
    search: bool = True

    def grid(self) -> AffineGrid:
        """Return the asymmetric two-bit grid."""
        return AffineGrid(2, self.group_size, static=self.static, search=self.search)

    def parameters(self, grid: AffineGrid) -> Tensor:
        """Interleave scales and offsets."""
        return torch.stack([grid.scales, grid.offsets], dim=-1).flatten(2)

    def scaled(self, parameters: Tensor, factors: Tensor) -> Tensor:
        """Scale both."""
        limit = torch.finfo(torch.float16).max
        return (parameters * factors[..., None]).clamp(-limit, limit).half().float()

    def values(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Compute scale * code + offset."""
        group = torch.arange(codes.shape[2], device=codes.device) // self.group_size
        scales, offsets = parameters[..., ::2], parameters[..., 1::2]
        return scales[..., group] * codes + offsets[..., group]

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedBytes:
        """Pack the codes."""
        pairs = parameters.reshape(*parameters.shape[:2], parameters.shape[2] // 2, 2)
        scales, offsets = (part.contiguous().numpy() for part in pairs.unbind(-1))
        blob = _core.encode_groupwise(codes.numpy(), scales, offsets, bits=2, group_size=self.group_size, ndim=3)
        return PackedBytes("groupwise", blob, groupwise_details(blob))

    def bound(self, shape: Shape) -> int:
        """Return the packed size in bytes."""
        return packed_bytes(shape, 2, self.group_size, symmetric=False)


def groupwise_details(blob: NDArray[np.uint8]) -> dict[str, Any]:
    """Return the manifest details of a group-wise tensor: bits, group size, symmetry and parameter dtype."""
    return _core.PackedTensor(blob).details()
