"""Packed tensors whose values have gradients; codes do not change.

A product computes what the packed tensor will compute: values and activations are rounded as stored and as in the
kernels, with straight-through gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from moepack import _core
from moepack.solvers.activations import rotated, round_activations
from moepack.solvers.codebooks import look_up
from moepack.solvers.fixed_point import centroid_bits, fixed_point, split_blocks

__all__ = ["KINDS", "Books", "Scales", "TunedTensor"]


LONG = 512
"""Minimum number of columns of rows that get their own scale. The 16 bits are 0.03 bits per weight there; for shorter
rows they gain more when spent on codes (docs/methods/rate.md)."""


class TunedTensor(nn.Module, ABC):
    """A packed tensor [E, R, C]. Its parameters are relative changes of its values."""

    def inputs(self, x: Tensor) -> Tensor:
        """Return what the weights multiply, from activations [..., C]."""
        return x.float()

    @abstractmethod
    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply runs of rows, one run per expert, from `inputs`: x [N, C], giving [N, R]."""

    @abstractmethod
    def blob(self) -> Tensor:
        """Pack again; returns uint8 bytes."""


class Books(TunedTensor):
    """A codebook tensor; its size does not change.

    Attributes:
        moves: [E, R, B, K], change of each centroid, relative to the largest of its codebook.
        bits, block, width: bits per code, columns that share a codebook, columns that are rotated together.
        activation_bits: 0, 4 or 8.
    """

    codes: Tensor
    first: Tensor
    units: Tensor

    def __init__(self, data: Tensor) -> None:
        """Read the bytes of a tensor; they are not kept."""
        super().__init__()
        blob = _core.PackedTensor(data.numpy())
        details = blob.details()
        self.bits, self.activation_bits, self.width = (
            int(details[name]) for name in ("bits", "activation_bits", "hadamard")
        )
        self.ndim, self.block = blob.ndim, min(details["block_size"], max(blob.shape[2], 1))
        codes = torch.from_numpy(blob.decode())
        values = rotated(torch.from_numpy(blob.dequantize()), self.width)
        parts = zip(split_blocks(codes, self.block), split_blocks(values, self.block), strict=True)
        clusters = torch.zeros(*codes.shape[:2], 1 << self.bits)
        first = torch.stack([clusters.scatter(-1, code.long(), value) for code, value in parts], -2)
        self.register_buffer("codes", codes)
        self.register_buffer("first", first)
        self.register_buffer("units", first.abs().amax(-1, keepdim=True))
        self.moves = nn.Parameter(torch.zeros_like(first))

    def centroids(self) -> Tensor:
        """Return the centroids before rounding."""
        return self.first + self.units * self.moves

    def weights(self) -> Tensor:
        """Return the rotated weights [E, R, C] as they will be stored."""
        centroids = self.centroids()
        step = self.units / (127 if self.activation_bits else 32_639)
        rounded = (centroids / step.clamp(min=1e-30)).round() * step
        return look_up(self.codes, centroids + (rounded - centroids).detach(), self.block)

    def inputs(self, x: Tensor) -> Tensor:
        """Return activations, rotated and rounded."""
        x = rotated(x.float(), self.width)
        return x + (round_activations(x.detach(), self.activation_bits) - x.detach())

    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply by the centroids of the codes."""
        return _grouped(x, self.weights(), counts)

    def blob(self) -> Tensor:
        """Pack the codes with the current centroids."""
        stored = fixed_point(self.centroids().detach().cpu(), centroid_bits(self.activation_bits))
        data = _core.encode_codebook(
            self.codes.cpu().numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=self.bits,
            block=1 << 20 if self.first.shape[2] < 2 else self.block, ndim=self.ndim,
            activation_bits=self.activation_bits, hadamard=self.width,
        )  # fmt: skip
        return torch.from_numpy(data)


class Scales(TunedTensor):
    """A coded tensor; its streams do not change. Long rows get their own scales.

    Attributes:
        moves: [E, R] or [1, 1], relative change of each row scale, a bfloat16.
        turns: [E, C] or [1, C], relative change of each column scale; [1, 0] if there are none.
    """

    values: Tensor
    first: Tensor
    columns: Tensor

    def __init__(self, data: Tensor) -> None:
        """Read the bytes of a tensor, which are kept."""
        super().__init__()
        self.data, blob = data, _core.PackedTensor(data.numpy())
        self.ndim, first = blob.ndim, torch.from_numpy(blob.parameters("scales"))
        experts, rows, columns = blob.shape
        scaled = bool(blob.details().get("column_scales"))
        self.register_buffer("values", torch.from_numpy(blob.dequantize()))
        self.register_buffer("first", first.expand(experts, rows).clone() if columns >= LONG else first)
        self.register_buffer("columns", torch.from_numpy(blob.parameters("columns")) if scaled else torch.ones(1, 0))
        self.moves = nn.Parameter(torch.zeros_like(self.first))
        self.turns = nn.Parameter(torch.zeros_like(self.columns))

    def scales(self) -> Tensor:
        """Return the row scales as they will be stored."""
        return stored(self.first * (1 + self.moves))

    def column_scales(self) -> Tensor:
        """Return the column scales as they will be stored."""
        return stored(self.columns * (1 + self.turns))

    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply by the original values; scale activations and products by the changes of the scales."""
        expert = torch.repeat_interleave(torch.tensor(counts, device=x.device))
        if self.columns.numel():
            columns = relative(self.column_scales(), self.columns)
            x = x * (columns if len(columns) == 1 else columns[expert])
        rows = relative(self.scales(), self.first).expand(self.values.shape[:2])
        return _grouped(x, self.values, counts) * rows[expert]

    def blob(self) -> Tensor:
        """Return the tensor with the current scales; equal codes are encoded into equal streams."""
        data, scales = self.data.numpy(), self.scales().detach().cpu().numpy()
        details = _core.PackedTensor(data).details()
        form = {name: details[name] for name in ("stream_rows", "symbols")}
        if self.columns.numel():
            form["columns"] = self.column_scales().detach().cpu().numpy()
        return torch.from_numpy(_core.encode_coded(_core.decode_coded(data), scales, ndim=self.ndim, **form))


def stored(scales: Tensor) -> Tensor:
    """Round scales to bfloat16, with straight-through gradients."""
    return scales + (scales.bfloat16().float() - scales).detach()


def relative(scales: Tensor, first: Tensor) -> Tensor:
    """Return scales divided by their initial values; 1 if those were zero."""
    return torch.where(first == 0, 1, scales / torch.where(first == 0, 1, first))


KINDS: dict[str, type[Books | Scales]] = {"codebook": Books, "coded": Scales}
"""Classes of tensors that can be fine-tuned, by format."""


def _grouped(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Multiply runs of rows by their experts: x [N, C], weights [E, R, C], giving [N, R]."""
    runs = torch.split(x, counts)
    return torch.cat([run @ weight.T for run, weight in zip(runs, weights, strict=True)])
