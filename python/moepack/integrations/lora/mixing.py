"""Runs several LoRA adapters in one pass: all tokens share the product of the base layer, and each adapter adds its
low-rank part to its own tokens.

peft's `adapter_names` chooses an adapter per row of a batch, and not for parameters of experts. Here, tokens of several
sequences are one row, so hooks on peft's layers add the parts while all adapters are disabled.

Invariant: a layer whose inputs are not the tokens of the pass raises `UnmixableError` before it computes anything.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from moepack.integrations.lora.layers import PackedLoraLinear, ParamWrapper
from moepack.modules.adapters import LowRank
from moepack.modules.experts import PackedEveryExperts, PackedExpertProducts

__all__ = ["Mixing", "UnmixableError"]

Groups = Mapping[str, torch.Tensor]
"""For each adapter, which tokens of the pass it reads: [T] bool, by peft's name of the adapter."""


class UnmixableError(Exception):
    """A layer cannot tell which adapter each of its inputs belongs to."""


class Mixing:
    """The hooks of one model.

    Attributes:
        is_possible: whether one pass can run several adapters.

    Args:
        model: a model with LoRA adapters in evaluation mode, which never change from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        others = any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules())
        self.is_possible = not others and all(map(_is_mixable, layers))
        self._groups: Groups = {}
        self._factors: dict[tuple[nn.Module, str], dict[str, LowRank]] = {}
        for layer in layers if self.is_possible else ():
            if isinstance(layer, ParamWrapper):
                layer.register_forward_pre_hook(self._before_experts, with_kwargs=True)
            else:
                layer.register_forward_hook(self._after_linear)

    @contextmanager
    def of(self, groups: Groups) -> Iterator[None]:
        """Add the parts of adapters to passes in this block. All adapters must be disabled."""
        self._groups = groups
        try:
            yield
        finally:
            self._groups = {}

    def _check(self, tokens: int) -> None:
        """Check that a layer reads all tokens of the pass."""
        if any(len(own) != tokens for own in self._groups.values()):
            self.is_possible = False
            raise UnmixableError(f"a layer with adapters reads {tokens} rows, not the tokens of the pass")

    def _after_linear(self, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add the low-rank parts to the output of a linear layer, [..., R]."""
        if not self._groups:
            return output
        rows, found = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
        self._check(len(rows))
        for name, own in self._groups.items():
            if name in layer.lora_A:
                down, up = layer.lora_A[name], layer.lora_B[name]
                added = up(down(rows[own].to(down.weight.dtype))) * layer.scaling[name]
                found[own] = (found[own] + added).to(found.dtype)
        return found.view(output.shape)

    def _before_experts(self, layer: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Pass the low-rank parts of a parameter to packed experts."""
        if not self._groups:
            return None
        self._check(len(inputs[0].reshape(-1, inputs[0].shape[-1])))
        adapters = {name: [*each] for name, each in settings.get("adapters", {}).items()}
        for name, own in self._groups.items():
            if name in layer.lora_A:
                for projection, factors in self._factors_of(layer, name).items():
                    adapters.setdefault(projection, []).append(factors.of(own))
        return inputs, {**settings, "adapters": adapters}

    def _factors_of(self, layer: ParamWrapper, name: str) -> dict[str, LowRank]:
        """Return the factors of an adapter by projection, computed once."""
        if (layer, name) not in self._factors:
            self._factors[layer, name] = layer.factors(name)
        return self._factors[layer, name]


def _is_mixable(layer: Any) -> bool:
    """Return whether hooks can add the layer's low-rank parts: no DoRA, and experts that know their tokens."""
    if isinstance(layer, ParamWrapper):
        return not isinstance(layer.get_base_layer(), PackedExpertProducts | PackedEveryExperts)
    return type(layer) in (lora.Linear, PackedLoraLinear) and not layer.lora_variant
