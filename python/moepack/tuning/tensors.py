"""Packed tensors whose values have gradients; codes stay.

A product computes what the packed tensor's will: values and activations rounded as they are stored and as kernels round
them, with gradients passed straight through the steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from moepack import _core
from moepack.solvers.activations import rotated, round_activations
from moepack.solvers.codebooks import look_up
from moepack.solvers.fixed_point import centroid_bits, fixed_point, split_blocks

__all__ = ["KINDS", "Books", "Scales", "TunedTensor"]


LONG = 512
"""Columns of rows that get a scale of their own: the 16 bits are 0.03 a weight there, and buy more of shorter rows when
they are spent on codes (docs/methods/rate.md)."""


class TunedTensor(nn.Module, ABC):
    """A packed tensor [E, R, C]. Its parameters are relative ways from where its values were."""

    def inputs(self, x: Tensor) -> Tensor:
        """What the weights multiply, of activations [..., C]."""
        return x.float()

    @abstractmethod
    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply runs of rows, one an expert, as `inputs` gives them: x [N, C], to [N, R]."""

    @abstractmethod
    def blob(self) -> Tensor:
        """Pack again: the bytes, uint8."""


class Books(TunedTensor):
    """A codebook tensor; its bytes are as many as before.

    Attributes:
        moves: [E, R, B, K], of each centroid, relative to the largest of its codebook.
        bits, block, width: bits of a code, columns that share a codebook, columns that are rotated together.
        activation_bits: 0, 4 or 8.
    """

    codes: Tensor
    first: Tensor
    units: Tensor

    def __init__(self, data: Tensor) -> None:
        """Read the bytes of a tensor, which are not kept."""
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
        """Where the centroids are, before they are rounded."""
        return self.first + self.units * self.moves

    def weights(self) -> Tensor:
        """The rotated weights [E, R, C] as they will be stored."""
        centroids = self.centroids()
        step = self.units / (127 if self.activation_bits else 32_639)
        rounded = (centroids / step.clamp(min=1e-30)).round() * step
        return look_up(self.codes, centroids + (rounded - centroids).detach(), self.block)

    def inputs(self, x: Tensor) -> Tensor:
        """Activations rotated and rounded."""
        x = rotated(x.float(), self.width)
        return x + (round_activations(x.detach(), self.activation_bits) - x.detach())

    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply by the centroids that the codes stand for."""
        return _grouped(x, self.weights(), counts)

    def blob(self) -> Tensor:
        """Pack the codes with the centroids as they are now."""
        stored = fixed_point(self.centroids().detach().cpu(), centroid_bits(self.activation_bits))
        data = _core.encode_codebook(
            self.codes.cpu().numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=self.bits,
            block=1 << 20 if self.first.shape[2] < 2 else self.block, ndim=self.ndim,
            activation_bits=self.activation_bits, hadamard=self.width,
        )  # fmt: skip
        return torch.from_numpy(data)


class Scales(TunedTensor):
    """A coded tensor; its streams stay. Long rows come to have scales of their own.

    Attributes:
        moves: [E, R] or [1, 1], of each scale of rows, a bfloat16, relative to itself.
        turns: [E, C] or [1, C], of each scale of columns; [1, 0] where there are none.
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
        """The scales of rows as they will be stored."""
        return stored(self.first * (1 + self.moves))

    def column_scales(self) -> Tensor:
        """The scales of columns as they will be stored."""
        return stored(self.columns * (1 + self.turns))

    def products(self, x: Tensor, counts: list[int]) -> Tensor:
        """Multiply by the values as they were; activations and products by what became of the scales."""
        expert = torch.repeat_interleave(torch.tensor(counts, device=x.device))
        if self.columns.numel():
            columns = relative(self.column_scales(), self.columns)
            x = x * (columns if len(columns) == 1 else columns[expert])
        rows = relative(self.scales(), self.first).expand(self.values.shape[:2])
        return _grouped(x, self.values, counts) * rows[expert]

    def blob(self) -> Tensor:
        """The tensor with the scales as they are now; equal codes are coded into equal streams."""
        data, scales = self.data.numpy(), self.scales().detach().cpu().numpy()
        details = _core.PackedTensor(data).details()
        names = ("stream_rows", "low_bits", "dependent")
        form = {name: details[name] for name in names if name in details}
        if details.get("pairs", False):
            form["pairs"] = math.inf
        if self.columns.numel():
            form["columns"] = self.column_scales().detach().cpu().numpy()
        return torch.from_numpy(_core.encode_coded(_core.decode_coded(data), scales, ndim=self.ndim, **form))


def stored(scales: Tensor) -> Tensor:
    """Scales rounded to bfloat16, with gradients as if they were not."""
    return scales + (scales.bfloat16().float() - scales).detach()


def relative(scales: Tensor, first: Tensor) -> Tensor:
    """Scales over what they were; 1 where that was zero."""
    return torch.where(first == 0, 1, scales / torch.where(first == 0, 1, first))


KINDS: dict[str, type[Books | Scales]] = {"codebook": Books, "coded": Scales}
"""What can be fine-tuned, by the format."""


def _grouped(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Products of runs of rows with their experts: x [N, C], weights [E, R, C], to [N, R]."""
    runs = torch.split(x, counts)
    return torch.cat([run @ weight.T for run, weight in zip(runs, weights, strict=True)])
