"""Products by group-wise integers with low-rank compensators on a GPU: W = Wq + U V (docs/format.md, section 8).

The integers are multiplied by `cuda/groupwise.cu`. U (V x) is added by torch's batched products in float32, of factors
kept as float16 beside the packed bytes and padded to the largest rank, which rounds the correction by 2^-11. It takes
some ten launches a layer more than integers alone.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from moepack._core import PackedTensor
from moepack.runtime.backends.gpu.groupwise import GroupwiseKernels
from moepack.runtime.backends.gpu.layer import Struct
from moepack.runtime.backends.gpu.matrix import DeviceMatrix

__all__ = ["KERNELS", "CompensatedKernels"]

_HEADER = 128
"""Bytes in front of the blocks of the embedded group-wise tensor."""

_SLOTS = 32
"""Slots whose factors are gathered at a time."""


class CompensatedKernels(GroupwiseKernels):
    """Kernels of `compensated`, which also take `groupwise`. The tables of a matrix, K being the largest rank:

    - `right`, [E, K, C] float16: the rows of V;
    - `left`, [E, R, K] float16: those of U.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        super().prepare(matrix)
        experts, rows, columns = matrix.shape
        opened = PackedTensor(matrix.data.cpu().numpy())
        ranks = opened.parameters("ranks")
        right = torch.zeros(experts, max(ranks, default=0), columns, dtype=torch.float16)
        left = torch.zeros(experts, rows, right.shape[1], dtype=torch.float16)
        rights, lefts = (torch.from_numpy(opened.parameters(name)) for name in ("right", "left"))
        start = 0
        for expert, rank in enumerate(ranks.tolist()):
            right[expert, :rank] = rights[start : start + rank]
            left[expert, :, :rank] = lefts[start : start + rank].T
            start += rank
        matrix.tables["right"], matrix.tables["left"] = right.to(matrix.device), left.to(matrix.device)

    def struct(self, matrix: DeviceMatrix) -> Struct:
        """See `LayerKernels.struct`."""
        if matrix.kind == "compensated":
            start, size = matrix.sections["base"]
            matrix = replace(matrix, sections={"blocks": (start + _HEADER, size - _HEADER)})
        return super().struct(matrix)

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        super().linear(matrix, x, out)
        right, left = (matrix.tables[name][0].float() for name in ("right", "left"))
        out += x.float() @ right.T @ left.T

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`."""
        other = torch.empty_like(hidden)
        slots = x.repeat_interleave(index.shape[1], 0)
        for matrix, product in ((gate, hidden), (up, other)):
            self._by_slot("project", [matrix], x, index, product)
            for some, correction in _corrections(matrix, slots, index):
                product[some] += correction
        torch.mul(functional.silu(hidden), other, out=hidden)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`."""
        super().combine(down, hidden, index, weights, out)
        corrections = torch.cat([correction for _, correction in _corrections(down, hidden, index)])
        out += (corrections.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        super().dequantize(matrix, first, out)
        if matrix.tables:
            some = slice(first, first + len(out))
            right, left = (matrix.tables[name][some].to(out.dtype) for name in ("right", "left"))
            torch.baddbmm(out, left, right, out=out)


KERNELS = CompensatedKernels()


def _corrections(matrix: DeviceMatrix, slots: Tensor, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """U (V x) of some slots at a time; zeros for those of experts that do not exist. Nothing for plain integers.

    Args:
        matrix: the weights.
        slots: [T * k, C], the activations of each slot.
        index: [T, k].
    """
    if not matrix.tables:
        return
    experts = index.reshape(-1)
    exists = ((experts >= 0) & (experts < matrix.shape[0])).unsqueeze(-1)
    chosen = experts.clamp(0, matrix.shape[0] - 1)
    for start in range(0, len(slots), _SLOTS):
        some = slice(start, start + _SLOTS)
        x = torch.where(exists[some], slots[some].float(), 0.0).unsqueeze(-1)
        inner = torch.bmm(matrix.tables["right"][chosen[some]].float(), x)
        yield some, torch.bmm(matrix.tables["left"][chosen[some]].float(), inner).squeeze(-1)
