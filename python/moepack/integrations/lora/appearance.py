"""Packed modules as peft would find them in the unpacked model, while it looks for what it adapts.

Nothing here has memory: layers and parameters are on the meta device, and go when peft has looked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moepack.integrations.lora.refusals import is_adaptable
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule

__all__ = ["expert_parameters", "linear_layers"]


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Let an `nn.Linear` stand in the place of each packed linear layer."""
    replaced: list[tuple[nn.Module, str, PackedLinear]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                replaced.append((parent, name, child))
    try:
        for parent, name, layer in replaced:
            parent._modules[name] = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        yield
    finally:
        for parent, name, layer in replaced:
            parent._modules[name] = layer


@contextmanager
def expert_parameters(model: nn.Module) -> Iterator[None]:
    """Let packed experts have the parameters that they stand for."""
    shown: list[tuple[Any, str]] = []
    try:
        for module in list(model.modules()):
            if isinstance(module, PackedModule) and is_adaptable(module):
                for name, shape in module.stock.items():
                    # Not by `register_parameter`, which refuses the name of a buffer: packed bytes may have it.
                    module._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                    shown.append((module, name))
        yield
    finally:
        for module, name in shown:
            del module._parameters[name]
