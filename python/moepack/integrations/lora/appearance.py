"""Packed modules as peft would find them in the unpacked model, while it looks for what it adapts.

Nothing here takes memory: layers are on the meta device, and parameters, whose device peft asks for, have one number.
They go when peft has looked.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from moepack.integrations.lora.refusals import is_adaptable
from moepack.runtime.embedding import PackedEmbedding
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule

__all__ = ["embedding_weights", "expert_parameters", "linear_layers"]


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


def expert_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """Let packed experts have the parameters that they stand for."""
    experts = [module for module in model.modules() if isinstance(module, PackedModule) and is_adaptable(module)]
    return _shown([(module, name, shape) for module in experts for name, shape in module.stock.items()])


def embedding_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Let packed embeddings have the parameter that they stand for."""
    found = [module for module in model.modules() if isinstance(module, PackedEmbedding)]
    return _shown([(module, "weight", (module.num_embeddings, module.embedding_dim)) for module in found])


@contextmanager
def _shown(parameters: list[tuple[PackedModule, str, tuple[int, ...]]]) -> Iterator[None]:
    """Let modules have parameters of some names and shapes."""
    try:
        for module, name, shape in parameters:
            values = torch.zeros(1, device=module.qweight.device).expand(shape)
            # Not by `register_parameter`, which refuses the name of a buffer: packed bytes may have it.
            module._parameters[name] = nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for module, name, _ in parameters:
            module._parameters.pop(name, None)
