"""Runs several LoRA adapters in one pass: all tokens share the product of the base layer, and each adapter adds its
low-rank part to its own tokens.

peft's `adapter_names` chooses an adapter per row of a batch, and not for parameters of experts. Here, tokens of several
sequences are one row, so hooks on peft's layers add the parts while all adapters are disabled.

Invariant: a layer whose inputs are not the tokens of the pass raises `UnmixableError` before it computes anything.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional

from moepack.integrations.lora.layers import PackedLoraLinear, ParamWrapper
from moepack.modules.adapters import LowRank
from moepack.modules.experts import PackedEveryExperts, PackedExpertProducts

__all__ = ["Mixing", "UnmixableError"]

Groups = Mapping[str, torch.Tensor]
"""For each adapter, which tokens of the pass it reads: [T] bool, by peft's name of the adapter."""

KEPT = 2
"""Number of sets of adapters whose factors are kept side by side. Each is a copy of the factors."""


class UnmixableError(Exception):
    """A layer cannot tell which adapter each of its inputs belongs to."""


class Mixing:
    """The hooks of one model.

    The factors of all adapters of a pass lie side by side, so their number of products does not depend on the number of
    adapters. Each token multiplies the ranks of other adapters by zero.

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
        self._kept: dict[tuple[str, ...], dict[nn.Module, Any]] = {}
        self._shares: dict[tuple[tuple[str, int, float], ...], torch.Tensor] = {}
        for layer in layers if self.is_possible else ():
            if isinstance(layer, ParamWrapper):
                layer.register_forward_pre_hook(self._before_experts, with_kwargs=True)
            else:
                layer.register_forward_hook(self._after_linear)

    @contextmanager
    def of(self, groups: Groups) -> Iterator[None]:
        """Add the parts of adapters to passes in this block. All adapters must be disabled."""
        self._groups, self._shares = groups, {}
        try:
            yield
        finally:
            self._groups, self._shares = {}, {}

    def _check(self, tokens: int) -> None:
        """Check that a layer reads all tokens of the pass."""
        if any(len(own) != tokens for own in self._groups.values()):
            self.is_possible = False
            raise UnmixableError(f"a layer with adapters reads {tokens} rows, not the tokens of the pass")

    def _after_linear(self, layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add the low-rank parts to the output of a linear layer, [..., R]."""
        names = self._names(layer)
        if not names:
            return output
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        self._check(len(rows))
        down, up = self._stacked(layer, _linear_factors)
        shares = self._shares_of([(name, layer.r[name], layer.scaling[name]) for name in names], down)
        added = functional.linear(functional.linear(rows.to(down.dtype), down) * shares, up)
        return (output + added.view(output.shape)).to(output.dtype)

    def _before_experts(self, layer: Any, inputs: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Pass the low-rank parts of a parameter to packed experts. Their factors include the scaling."""
        names = self._names(layer)
        if not names:
            return None
        self._check(len(inputs[0].reshape(-1, inputs[0].shape[-1])))
        adapters = {name: [*each] for name, each in settings.get("adapters", {}).items()}
        for projection, factors in self._stacked(layer, _expert_factors).items():
            ranks = [(name, layer.r[name], 1.0) for name in names]
            adapters.setdefault(projection, []).append(factors.of(self._shares_of(ranks, factors.down)))
        return inputs, {**settings, "adapters": adapters}

    def _names(self, layer: Any) -> list[str]:
        """Return the adapters of the pass that adapt a layer."""
        return [name for name in self._groups if name in layer.lora_A]

    def _stacked(self, layer: nn.Module, make: Callable[[Any, list[str]], Any]) -> Any:
        """Return the factors of a layer for the adapters of the pass, side by side."""
        names = tuple(self._groups)
        kept = self._kept.pop(names, {})
        self._kept[names] = kept  # the last set that was used
        if len(self._kept) > KEPT:
            self._kept.pop(next(iter(self._kept)))
        if layer not in kept:
            kept[layer] = make(layer, self._names(layer))
        return kept[layer]

    def _shares_of(self, ranks: list[tuple[str, int, float]], like: torch.Tensor) -> torch.Tensor:
        """Return what each token multiplies each rank by, [T, r]: the scaling of its own adapter, or zero."""
        key = tuple(ranks)
        if key not in self._shares:
            columns = [
                (scaling * self._groups[name].to(like))[:, None].expand(-1, rank) for name, rank, scaling in ranks
            ]
            self._shares[key] = torch.cat(columns, 1)
        return self._shares[key].to(like)


def _linear_factors(layer: Any, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of adapters of a linear layer: [r, C] and [R, r]."""
    down, up = ([getattr(layer, name)[key].weight for key in names] for name in ("lora_A", "lora_B"))
    return torch.cat(down), torch.cat(up, 1)


def _expert_factors(layer: ParamWrapper, names: list[str]) -> dict[str, LowRank]:
    """Return the factors of adapters of experts by projection."""
    each = [layer.factors(name) for name in names]
    return {projection: LowRank.stacked([factors[projection] for factors in each]) for projection in each[0]}


def _is_mixable(layer: Any) -> bool:
    """Return whether hooks can add the layer's low-rank parts: no DoRA, no bias, and experts that know their tokens."""
    if isinstance(layer, ParamWrapper):
        return not isinstance(layer.get_base_layer(), PackedExpertProducts | PackedEveryExperts)
    is_plain = not layer.lora_variant and not any(layer.lora_bias.values())
    return type(layer) in (lora.Linear, PackedLoraLinear) and is_plain
