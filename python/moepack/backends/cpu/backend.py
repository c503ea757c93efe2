"""Products of packed weights on the CPU, by the core or by formats written in Python.

Tokens are sorted by expert, so the bytes of each expert are decoded once per call for any number of tokens, and all
experts are multiplied in one call. A layer with a SiLU gate and core formats only is a single call into the core.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moepack._core import (
    PackedTensor,
    StreamedChannels,
    gated_experts,
    refine_channels,
    sparse_channels,
    sparse_experts,
)
from moepack.backends.base import Activation, Backend, Coarse, Matrix, is_silu
from moepack.backends.compute import product_mode
from moepack.backends.cpu.views import activations
from moepack.errors import LoadError
from moepack.registry import OpenTensor, open_tensor

__all__ = ["CpuBackend", "Routing", "sort_by_expert"]

CHANNELS = "channels"
"""The kind of tensors that store gate and down projections by channel."""


class Routing(NamedTuple):
    """Pairs of tokens and experts, sorted by expert.

    Attributes:
        order: [N], positions in the flattened [T, k] index, sorted by expert, without out-of-range experts.
        offsets: [E + 1], the start of each expert's run in `order`; the last is N.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]


class CpuBackend(Backend):
    """The core's kernels; matrices are open tensors (`moepack.registry`)."""

    def supports(self, device: torch.device) -> bool:
        """Whether the device is the CPU."""
        return device.type == "cpu"

    def open(self, data: Tensor, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> OpenTensor:
        """Open bytes by their magic number; see `Backend.open`."""
        return open_tensor(data.numpy(), file=file, tensor=tensor)

    def linear(self, matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
        """See `Backend.linear`."""
        return _product(matrix, x, np.array([0, len(x)], np.int64), mode)

    def grouped(self, matrix: Matrix, x: Tensor, offsets: Tensor, mode: str | None) -> Tensor:
        """See `Backend.grouped`."""
        count = int(offsets[-1])
        found = _product(matrix, x[:count], offsets.numpy(), mode)
        return functional.pad(found, (0, 0, 0, len(x) - count))

    def transposed(self, matrix: Matrix, y: Tensor, offsets: Tensor | None) -> Tensor:
        """See `Backend.transposed`."""
        if not isinstance(matrix, PackedTensor):
            raise LoadError(f"the format {matrix.format} does not support gradients")
        runs = np.array([0, len(y)], np.int64) if offsets is None else offsets.numpy()
        found = torch.from_numpy(matrix.matmul_transposed(activations(y[: runs[-1]]), runs))
        return functional.pad(found, (0, 0, 0, len(y) - len(found)))

    def experts(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        activation: Activation,
        mode: str | None,
    ) -> Tensor:
        """See `Backend.experts`."""
        if getattr(matrices[-1], "kind", "") == CHANNELS:
            return self.sparse_experts(matrices, x, index, weights, mode)[0]
        weights = weights.float().contiguous()
        if len(matrices) == 3 and is_silu(activation) and all(isinstance(matrix, PackedTensor) for matrix in matrices):
            gate, up, down = cast(Sequence[PackedTensor], matrices)
            modes = product_mode(gate, mode), product_mode(up, mode), product_mode(down, mode)
            choice = index.long().contiguous().numpy(), weights.numpy()
            return torch.from_numpy(gated_experts(gate, up, down, activations(x), *choice, modes))
        positions, offsets = sort_by_expert(index.reshape(-1).numpy(), matrices[0].shape[0])
        if len(x) == 1:
            outputs = _outputs(matrices, x.expand(len(positions), -1), offsets, activation, mode)
            return torch.mm(weights.take(torch.from_numpy(positions)).unsqueeze(0), outputs)
        rows = torch.from_numpy(positions // index.shape[1])
        outputs = _outputs(matrices, x.index_select(0, rows), offsets, activation, mode)
        return _weighted_sum(outputs, positions, weights)

    def sparse_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, mode: str | None
    ) -> tuple[Tensor, int]:
        """See `Backend.sparse_experts`."""
        if len(matrices) > 2:
            coarse = self.coarse_channels(matrices, x, index, weights, mode)
            refined, computed = self.refined_channels(matrices[-1], x, index, weights, coarse, coarse.ups)
            return refined.add_(self.coarse_outputs(matrices[-2], coarse, index, weights, mode)), computed
        up, channels = cast(Sequence[PackedTensor], matrices)
        choice = index.long().contiguous().numpy(), weights.float().contiguous().numpy()
        y, computed = sparse_experts(up, channels, activations(x), *choice, deciding_mode(up, mode))
        return torch.from_numpy(y), computed

    def wanted_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        mode: str | None,
        weights: Tensor | None = None,
        deciding: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.wanted_channels`."""
        places = _Places(index, matrices[0].shape[0])
        by = places.judged(matrices, x if deciding is None else deciding, weights, mode)
        up = matrices[0] if len(matrices) == 2 else matrices[1]
        ups = by.ups if deciding is None else places.product(up, x, deciding_mode(up, mode))
        return places.placed(ups.masked_fill_(by.below, 0))

    def coarse_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        mode: str | None,
        deciding: Tensor | None = None,
    ) -> Coarse:
        """See `Backend.coarse_channels`."""
        places = _Places(index, matrices[0].shape[0])
        by = places.judged(matrices, x, weights, mode)
        below = by.below if deciding is None else places.judged(matrices, deciding, weights, mode).below
        assert by.gates is not None and by.inner is not None
        return Coarse(*map(places.placed, (by.gates, by.ups.masked_fill(below, 0), by.inner)))

    def refined_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, coarse: Coarse, ups: Tensor
    ) -> tuple[Tensor, int]:
        """See `Backend.refined_channels`."""
        choice = index.long().contiguous().numpy(), weights.float().contiguous().numpy()
        known = ups.numpy(), coarse.gates.numpy(), coarse.inner.numpy()
        y, computed = refine_channels(cast(PackedTensor | StreamedChannels, records), activations(x), *choice, *known)
        return torch.from_numpy(y), computed

    def coarse_outputs(self, down: Matrix, coarse: Coarse, index: Tensor, weights: Tensor, mode: str | None) -> Tensor:
        """See `Backend.coarse_outputs`."""
        places = _Places(index, down.shape[0])
        outputs = _product(down, places.taken(coarse.inner), places.offsets, mode)
        return _weighted_sum(outputs, places.positions, weights.float())

    def sparse_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, ups: Tensor
    ) -> tuple[Tensor, int]:
        """See `Backend.sparse_channels`."""
        choice = index.long().contiguous().numpy(), weights.float().contiguous().numpy()
        y, computed = sparse_channels(
            cast(PackedTensor | StreamedChannels, records), activations(x), *choice, ups.numpy()
        )
        return torch.from_numpy(y), computed


class _Judged(NamedTuple):
    """Values that select channels, for each (token, expert) pair, [N, I].

    Attributes:
        ups: outputs of the up projection.
        gates, inner: outputs of the coarse gate, and silu(gate) * up; None without coarse copies.
        below: mask of channels below their threshold.
    """

    ups: Tensor
    gates: Tensor | None
    inner: Tensor | None
    below: Tensor


class _Places:
    """The (token, expert) pairs of an index [T, k], sorted by expert."""

    def __init__(self, index: Tensor, experts: int) -> None:
        self.index = index
        self.positions, self.offsets = sort_by_expert(index.reshape(-1).numpy(), experts)
        self._pairs = torch.from_numpy(self.positions)

    def product(self, matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
        """Multiply tokens [T, H] by the matrices of their experts; return [N, I]."""
        return _product(matrix, x[self._pairs // self.index.shape[1]], self.offsets, mode)

    def judged(self, matrices: Sequence[Matrix], x: Tensor, weights: Tensor | None, mode: str | None) -> _Judged:
        """Compare channels with thresholds: by outputs of up, or by coarse gate, up and routing weights."""
        *deciders, channels = matrices
        thresholds = _thresholds(channels)[self.index.reshape(-1)[self._pairs].long()][:, None]
        if len(deciders) == 1:
            ups = self.product(deciders[0], x, deciding_mode(deciders[0], mode))
            return _Judged(ups, None, None, ups.abs() < thresholds)
        assert weights is not None
        gates, ups = (self.product(matrix, x, mode) for matrix in deciders[:2])
        inner = functional.silu(gates).mul_(ups)
        sizes = inner.abs().mul_(weights.reshape(-1)[self._pairs].float().abs()[:, None])
        return _Judged(ups, gates, inner, sizes < thresholds)

    def taken(self, values: Tensor) -> Tensor:
        """Gather the rows [N, I] of the pairs from [T, k, I]."""
        return values.reshape(-1, values.shape[-1])[self._pairs]

    def placed(self, values: Tensor) -> Tensor:
        """Scatter the rows [N, I] of the pairs to [T, k, I], zero elsewhere."""
        if len(self.positions) == self.index.numel() and (self.positions[1:] > self.positions[:-1]).all():
            return values.view(*self.index.shape, -1)
        placed = values.new_zeros((self.index.numel(), values.shape[1]))
        placed[self._pairs] = values
        return placed.view(*self.index.shape, -1)


def _thresholds(channels: Matrix) -> Tensor:
    """The thresholds of packed or streamed channels, [E]."""
    if isinstance(channels, StreamedChannels):
        return torch.from_numpy(channels.thresholds())
    return torch.from_numpy(cast(PackedTensor, channels).parameters("thresholds"))


def deciding_mode(up: Any, mode: str | None) -> str | None:
    """Return the mode of an up projection that selects channels.

    It equals `product_mode`, except that auto becomes int8 for 2-bit codes: their own error is about fifty times that
    of 8-bit activations.
    """
    chosen = product_mode(up, mode)
    coarse = chosen == "auto" and "int8" in up.modes and up.details().get("bits") == 2
    return "int8" if coarse else chosen


def sort_by_expert(index: NDArray[np.int64], experts: int) -> Routing:
    """Sort a flat array of expert indices, stably; values >= `experts` are dropped."""
    offsets = np.zeros(experts + 1, np.int64)
    np.cumsum(np.bincount(index, minlength=experts)[:experts], out=offsets[1:])
    order = index.argsort(kind="stable")[: offsets[-1]]
    return Routing(order, offsets)


def _outputs(
    matrices: Sequence[Matrix], x: Tensor, offsets: NDArray[np.int64], activation: Activation, mode: str | None
) -> Tensor:
    """Run the experts: x [N, H], sorted by expert, to [N, H] float32."""
    x = x.contiguous()
    first, *middle, last = matrices
    inner = activation(_product(first, x, offsets, mode))
    for matrix in middle:
        inner = inner.mul_(_product(matrix, x, offsets, mode))
    return _product(last, inner, offsets, mode)


def _product(matrix: Any, x: Tensor, offsets: NDArray[np.int64], mode: str | None) -> Tensor:
    """Grouped product: x [N, C], sorted by expert, to [N, R] float32."""
    return torch.from_numpy(matrix.matmul_grouped(activations(x), offsets, product_mode(matrix, mode)))


def _weighted_sum(outputs: Tensor, positions: NDArray[np.int64], weights: Tensor) -> Tensor:
    """Sum each token's outputs.

    An embedding bag gathers and sums in one pass; reordering the rows first takes three times as long.

    Args:
        outputs: [N, H] float32, sorted by expert.
        positions: [N], the position of each row in the flattened [T, k].
        weights: [T, k] float32.

    Returns:
        [T, H]; positions without a row count as zero.
    """
    count, total = len(positions), weights.numel()
    rows = np.full(total, count, np.int64)
    rows[positions] = np.arange(count)
    if count < total:
        outputs = functional.pad(outputs, (0, 0, 0, 1))
    bags = torch.from_numpy(rows).view(weights.shape)
    return functional.embedding_bag(bags, outputs, mode="sum", per_sample_weights=weights)
