"""Gains of norms with gradients.

A gain is a scale of columns that all readers of a norm share, so it is fine-tuned as scales are: relative to itself,
and rounded as it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Gain", "gain_of", "thaw_gains"]


class Gain(nn.Module):
    """The parametrization of a gain [C] by its relative change.

    Attributes:
        first: float32 [C], the gain as it was.
        dtype: what it is stored as.
    """

    first: Tensor

    def __init__(self, first: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("first", first.detach().float().clone())
        self.dtype = dtype

    def forward(self, moves: Tensor) -> Tensor:
        """The gain as it will be stored; gradients pass through the rounding."""
        gain = self.first * (1 + moves)
        return gain + (gain.to(self.dtype).float() - gain).detach()

    def right_inverse(self, gain: Tensor) -> Tensor:
        """The change of a gain that is as it was."""
        return torch.zeros_like(gain)


def thaw_gains(model: Any, stored: Mapping[str, torch.dtype]) -> dict[str, nn.Module]:
    """Give gradients to the gains of a model.

    Args:
        model: a packed model in float32.
        stored: the types of the tensors that may change, by their names in the model.

    Returns:
        The modules whose `weight` is a gain with gradients, by the name of the gain.
    """
    found = {}
    for path, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        name = f"{path}.weight"
        if isinstance(weight, nn.Parameter) and weight.ndim == 1 and name in stored:
            parametrize.register_parametrization(module, "weight", Gain(weight, stored[name]), unsafe=True)
            cast(Any, module).parametrizations.weight.original.requires_grad_(True)
            found[name] = module
    return found


def gain_of(module: nn.Module) -> Tensor:
    """The gain of a module of `thaw_gains`, as it will be stored."""
    (gain,) = cast(Any, module).parametrizations.weight
    return cast(Tensor, module.weight).detach().to("cpu", gain.dtype)
