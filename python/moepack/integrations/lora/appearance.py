"""Shows packed modules to peft as in the unpacked model, while it searches for target modules.

The stand-ins take no memory: layers are on the meta device, and parameters, whose device peft reads, hold one number.
They are removed after the search.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from moepack.integrations.refusals import is_adaptable
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule

__all__ = ["embedding_weights", "expert_parameters", "linear_layers"]


@contextmanager
def linear_layers(model: nn.Module) -> Iterator[None]:
    """Replace each packed linear layer by an `nn.Linear` on the meta device."""
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
    """Give packed experts the parameters of the unpacked module."""
    experts = [module for module in model.modules() if isinstance(module, PackedModule) and is_adaptable(module)]
    return _shown([(module, name, shape) for module in experts for name, shape in module.stock.items()])


def embedding_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Give packed embeddings the parameter of the unpacked module."""
    found = [module for module in model.modules() if isinstance(module, PackedEmbedding)]
    return _shown([(module, "weight", (module.num_embeddings, module.embedding_dim)) for module in found])


@contextmanager
def _shown(parameters: list[tuple[PackedModule, str, tuple[int, ...]]]) -> Iterator[None]:
    """Give modules parameters of the given names and shapes."""
    try:
        for module, name, shape in parameters:
            values = torch.zeros(1, device=module.qweight.device).expand(shape)
            # `register_parameter` would reject the name of a buffer, which packed bytes may have.
            module._parameters[name] = nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for module, name, _ in parameters:
            module._parameters.pop(name, None)
