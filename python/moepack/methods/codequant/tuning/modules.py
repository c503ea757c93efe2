"""Packed modules with centroids that have gradients; codes stay.

A forward pass computes what the packed module will: centroids and activations rounded as they are stored and as kernels
round them, with gradients passed straight through the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moepack import _core
from moepack.errors import UnsupportedModelError
from moepack.runtime.experts import PackedExperts
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule
from moepack.solvers.activations import round_activations, turned
from moepack.solvers.codebooks import look_up
from moepack.solvers.fixed_point import centroid_bits, fixed_point, split_blocks

__all__ = ["Books", "TunedExperts", "TunedLinear", "thaw"]


class Books(nn.Module):
    """A codebook tensor.

    Attributes:
        moves: [E, R, B, K] float32, what gradient steps change: the way of each centroid from where it was, relative
            to the largest of its codebook.
        bits, block, width: bits of a code, columns that share a codebook, columns that are turned together.
        activation_bits: 0, 4 or 8.
    """

    codes: Tensor
    first: Tensor
    units: Tensor

    def __init__(self, blob: _core.PackedTensor) -> None:
        """Read a blob; its bytes are not kept."""
        super().__init__()
        details = blob.details()
        self.bits, self.activation_bits, self.width = (
            int(details[name]) for name in ("bits", "activation_bits", "hadamard")
        )
        self.ndim, self.block = blob.ndim, min(details["block_size"], max(blob.shape[2], 1))
        codes = torch.from_numpy(blob.decode())
        values = turned(torch.from_numpy(blob.dequantize()), self.width)
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
        """The turned weights [E, R, C] as they will be stored."""
        centroids = self.centroids()
        step = self.units / (127 if self.activation_bits else 32_639)
        rounded = (centroids / step.clamp(min=1e-30)).round() * step
        return look_up(self.codes, centroids + (rounded - centroids).detach(), self.block)

    def inputs(self, x: Tensor) -> Tensor:
        """What the weights multiply: x [..., C] turned and rounded."""
        x = turned(x.float(), self.width)
        return x + (round_activations(x.detach(), self.activation_bits) - x.detach())

    def blob(self) -> Tensor:
        """Pack again: the bytes, uint8, as many as before."""
        stored = fixed_point(self.centroids().detach().cpu(), centroid_bits(self.activation_bits))
        data = _core.encode_codebook(
            self.codes.cpu().numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=self.bits,
            block=1 << 20 if self.first.shape[2] < 2 else self.block, ndim=self.ndim,
            activation_bits=self.activation_bits, hadamard=self.width,
        )  # fmt: skip
        return torch.from_numpy(data)


class TunedLinear(nn.Module):
    """A packed linear layer with gradients."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.books = nn.ModuleDict({"packed": Books(_blob(packed, "packed"))})
        self.bias = packed.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., C], to [..., R]."""
        books = self.books["packed"]
        assert isinstance(books, Books)
        return functional.linear(books.inputs(x), books.weights()[0], self.bias).to(x.dtype)


class TunedExperts(nn.Module):
    """Packed gated experts with gradients; called as transformers calls experts."""

    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        self.books = nn.ModuleDict({name: Books(_blob(packed, name)) for name in packed.projections})
        self.act_fn: Callable[[Tensor], Tensor] = packed.act_fn
        self.num_experts = packed.num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the chosen experts' outputs: [T, H], [T, k], [T, k], to [T, H]."""
        gate, up, down = (self.books[name] for name in ("gate_proj", "up_proj", "down_proj"))
        assert isinstance(gate, Books) and isinstance(up, Books) and isinstance(down, Books)
        choices = top_k_index.reshape(-1)
        order = choices.argsort(stable=True)
        counts = torch.bincount(choices, minlength=self.num_experts)[: self.num_experts].tolist()
        order = order[: sum(counts)]
        tokens = order // top_k_index.shape[1]
        x = gate.inputs(hidden_states)[tokens]
        hidden = self.act_fn(_grouped(x, gate.weights(), counts)) * _grouped(x, up.weights(), counts)
        outputs = _grouped(down.inputs(hidden), down.weights(), counts)
        shares = top_k_weights.reshape(-1)[order].to(outputs.dtype)[:, None]
        total = torch.zeros(hidden_states.shape, dtype=outputs.dtype, device=outputs.device)
        return total.index_add(0, tokens, outputs * shares).to(hidden_states.dtype)


def thaw(model: nn.Module) -> dict[str, Books]:
    """Replace a packed model's modules by ones with gradients; everything else stops having them.

    Returns:
        The codebooks by the path of their module and their projection, as in `TensorRecord`: "model.layers.0.mlp
        .experts/gate_proj", "model.layers.0.self_attn.o_proj/packed".

    Raises:
        UnsupportedModelError: something is packed in another format, or in modules without a gate.
    """
    model.requires_grad_(False)
    found: dict[str, Books] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedModule):
            continue
        if isinstance(module, PackedLinear):
            made: TunedLinear | TunedExperts = TunedLinear(module)
        elif isinstance(module, PackedExperts):
            made = TunedExperts(module)
        else:
            raise UnsupportedModelError(f"cannot fine-tune '{path}', a {type(module).__name__}")
        model.set_submodule(path, made)
        found |= {f"{path}/{name}": books for name, books in made.books.items() if isinstance(books, Books)}
    return found


def _blob(module: PackedModule, projection: str) -> _core.PackedTensor:
    matrix = module.matrix(projection)
    if not isinstance(matrix, _core.PackedTensor) or matrix.kind != "codebook":
        raise UnsupportedModelError(f"only codebooks can be fine-tuned, not {matrix.format}")
    return matrix


def _grouped(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Products of runs of rows with their experts: x [N, C], weights [E, R, C], to [N, R]."""
    runs = torch.split(x, counts)
    return torch.cat([run @ weight.T for run, weight in zip(runs, weights, strict=True)])
