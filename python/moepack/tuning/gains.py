"""Gains of norms with gradients.

A gain is a column scale shared by all layers that read a norm. It is fine-tuned like scales: relative to its initial
value, and rounded as stored.
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
        first: float32 [C], the initial gain.
        dtype: the stored dtype.
    """

    first: Tensor

    def __init__(self, first: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("first", first.detach().float().clone())
        self.dtype = dtype

    def forward(self, moves: Tensor) -> Tensor:
        """Return the gain as it will be stored; gradients pass through the rounding."""
        gain = self.first * (1 + moves)
        return gain + (gain.to(self.dtype).float() - gain).detach()

    def right_inverse(self, gain: Tensor) -> Tensor:
        """Return the change of an unmodified gain, zero."""
        return torch.zeros_like(gain)


def thaw_gains(model: Any, stored: Mapping[str, torch.dtype]) -> dict[str, nn.Module]:
    """Give gradients to the gains of a model.

    Args:
        model: a packed model in float32.
        stored: stored dtypes of the tensors that may change, by their names in the model.

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
    """Return the gain of a module from `thaw_gains`, as it will be stored."""
    (gain,) = cast(Any, module).parametrizations.weight
    return cast(Tensor, module.weight).detach().to("cpu", gain.dtype)
