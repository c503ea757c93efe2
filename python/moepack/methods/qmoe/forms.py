"""What a projection is quantized to and stored as: ternary rows, or two-bit groups.

A form knows its grid, the parameters beside the codes, and the packed bytes. Values are always computed from the
parameters *as stored*, so that what calibration feeds to the next block is what a reader of the packed file sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack import _core
from moepack.methods.base import PackedTensor, Shape
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.ternary import Ternary
from moepack.solvers.grids import AffineGrid, TernaryGrid

__all__ = ["Form", "GroupwiseForm", "TernaryForm", "groupwise_details"]


class Form(Protocol):
    """One way to store a projection. Codes are [E, R, C], parameters [E, R, P]."""

    def grid(self) -> Any:
        """Return a fresh grid for the solver."""

    def parameters(self, grid: Any) -> Tensor:
        """Return the fitted grid's parameters."""

    def scaled(self, parameters: Tensor, factors: Tensor) -> Tensor:
        """Parameters, rounded as stored, whose values are those of `parameters` times `factors` [E, R]."""

    def values(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Return the float32 values of codes."""

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedTensor:
        """Pack a projection; both tensors lie on the CPU."""

    def bound(self, shape: Shape) -> int:
        """Return the most bytes that a projection can take packed."""


@dataclass(frozen=True)
class TernaryForm:
    """Ternary rows, entropy coded. Parameters are the two levels of a row, in bf16."""

    code: str = "fsv8"

    def grid(self) -> TernaryGrid:
        """Return the paper's grid: minimum, zero and maximum of each row."""
        return TernaryGrid()

    def parameters(self, grid: TernaryGrid) -> Tensor:
        """Return the levels, (negative, positive)."""
        return grid.levels

    def scaled(self, parameters: Tensor, factors: Tensor) -> Tensor:
        """Scale the levels."""
        limit = torch.finfo(torch.bfloat16).max
        return (parameters * factors[..., None]).clamp(-limit, limit).bfloat16().float()

    def values(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """Look the levels up."""
        low, high = parameters.unsqueeze(2).unbind(-1)
        return torch.where(codes > 0, high, torch.where(codes < 0, low, torch.zeros_like(low)))

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedTensor:
        """Encode the codes."""
        levels = parameters.numpy().astype(np.float32) + 0.0  # without negative zeros, opposite levels are stored once
        blob = _core.encode_ternary(codes.numpy(), levels, ndim=3, code=self.code)
        return PackedTensor(
            "ternary", blob, {"code": self.code, "nonzeros": _core.PackedTensor(blob).details()["nonzeros"]}
        )

    def bound(self, shape: Shape) -> int:
        """Return the size of a blob all of whose rows are as bad as the code allows."""
        return Ternary(self.code).bound(shape)


@dataclass(frozen=True)
class GroupwiseForm:
    """Two bits a weight. Parameters are scale and offset of each group, in f16.

    Attributes:
        group_size: columns a group: 16, 32, 64, 128 or 256.
        static: take the groups from the original weights (act-order needs it).
        search: narrow each group's range to the least squared error.
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

    def pack(self, codes: Tensor, parameters: Tensor) -> PackedTensor:
        """Pack the codes."""
        pairs = parameters.reshape(*parameters.shape[:2], parameters.shape[2] // 2, 2)
        scales, offsets = (part.contiguous().numpy() for part in pairs.unbind(-1))
        blob = _core.encode_groupwise(codes.numpy(), scales, offsets, bits=2, group_size=self.group_size, ndim=3)
        return PackedTensor("groupwise", blob, groupwise_details(blob))

    def bound(self, shape: Shape) -> int:
        """Return the size of the packed tensor."""
        return packed_bytes(shape, 2, self.group_size, symmetric=False)


def groupwise_details(blob: NDArray[np.uint8]) -> dict[str, Any]:
    """What a manifest says of a group-wise tensor: its header's bits, group size, symmetry and parameter type."""
    return _core.PackedTensor(blob).details()
