"""Packed modules during fine-tuning: torch operations around tensors whose values have gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from moepack import _core
from moepack.errors import UnsupportedModelError
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.experts import PackedExperts
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule
from moepack.tuning.tensors import KINDS, Scales, TunedTensor

__all__ = ["TunedExperts", "TunedLinear", "thaw"]


class TunedLinear(nn.Module):
    """A packed linear layer with gradients."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.tensors = nn.ModuleDict({"packed": _tensor(packed, "packed")})
        self.bias = packed.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., C], giving [..., R]."""
        tensor = cast(TunedTensor, self.tensors["packed"])
        rows = tensor.inputs(x).flatten(0, -2)
        products = tensor.products(rows, [len(rows)]).view(*x.shape[:-1], -1)
        return (products if self.bias is None else products + self.bias).to(x.dtype)


class TunedExperts(nn.Module):
    """Packed gated experts with gradients; called like transformers' experts."""

    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        self.tensors = nn.ModuleDict({name: _tensor(packed, name) for name in packed.projections})
        self.act_fn: Callable[[Tensor], Tensor] = packed.act_fn
        self.num_experts = packed.num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the chosen experts' outputs: [T, H], [T, k], [T, k], giving [T, H]."""
        gate, up, down = (cast(TunedTensor, self.tensors[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        choices = top_k_index.reshape(-1)
        order = choices.argsort(stable=True)
        counts = torch.bincount(choices, minlength=self.num_experts)[: self.num_experts].tolist()
        order = order[: sum(counts)]
        tokens = order // top_k_index.shape[1]
        x = gate.inputs(hidden_states)[tokens]
        hidden = self.act_fn(gate.products(x, counts)) * up.products(x, counts)
        outputs = down.products(down.inputs(hidden), counts)
        shares = top_k_weights.reshape(-1)[order].to(outputs.dtype)[:, None]
        total = torch.zeros(hidden_states.shape, dtype=outputs.dtype, device=outputs.device)
        return total.index_add(0, tokens, outputs * shares).to(hidden_states.dtype)


def thaw(model: Any) -> dict[str, TunedTensor]:
    """Replace a packed model's modules by ones with gradients; all other parameters are frozen.

    A coded embedding and head are not tuned: most rows of a vocabulary are rare in any text, and a tied head shares the
    embedding's rows. Codebooks of a head are fine-tuned.

    Returns:
        The fine-tuned tensors by module path and projection, as in `TensorRecord`:
        "model.layers.0.mlp.experts/gate_proj", "model.layers.0.self_attn.o_proj/packed".

    Raises:
        UnsupportedModelError: a tensor has another packed format, or a module has no gate.
    """
    model.requires_grad_(False)
    found: dict[str, TunedTensor] = {}
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedModule) or isinstance(module, PackedEmbedding):
            continue
        if isinstance(module, PackedLinear):
            made: TunedLinear | TunedExperts = TunedLinear(module)
        elif type(module) is PackedExperts:
            made = TunedExperts(module)
        else:
            raise UnsupportedModelError(f"cannot fine-tune '{path}', a {type(module).__name__}")
        model.set_submodule(path, made)
        tensors = {f"{path}/{name}": cast(TunedTensor, tensor) for name, tensor in made.tensors.items()}
        if module is head:
            tensors = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Scales)}
        found |= tensors
    return found


def _tensor(module: PackedModule, projection: str) -> TunedTensor:
    matrix = module.matrix(projection)
    if not isinstance(matrix, _core.PackedTensor) or matrix.kind not in KINDS:
        raise UnsupportedModelError(f"only {' and '.join(KINDS)} tensors can be fine-tuned, not {matrix.format}")
    return KINDS[matrix.kind](module.get_buffer(projection))
