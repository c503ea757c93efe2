"""Runs an adapted model in the scales of its source.

A model that was packed from the balanced form of a checkpoint (`moepack.checkpoint.balanced`) has norms, and matrices
that read them, in other scales than the checkpoint. Adapters are in the checkpoint's. While a model has adapters, its
unpacked parameters therefore return to the source's scales, and packed modules multiply their inputs and outputs by
the factors. All of peft then finds the source's function in every module. Removing the adapters restores the model.
"""

from typing import Any

import torch
from torch import Tensor

from moepack.integrations.decoding import unpacked_scales
from moepack.stores.module import PackedModule

__all__ = ["enter_source_scales", "leave_source_scales"]

_STORED = "_moepack_stored_scales"
"""Attribute of a model in its source's scales: its parameters as they are stored, by name."""


def enter_source_scales(model: Any) -> None:
    """Change a model to the scales of its source. Does nothing if it has them already.

    Raises:
        LoadError, CorruptionError: the factors cannot be read.
    """
    if _STORED in vars(model):
        return
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    stored: dict[str, Tensor] = {}
    for name, (key, balance) in unpacked_scales(model).items():
        parameter = model.get_parameter(name)
        stored[name] = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(balance.restored(key, parameter))
    for module in packed:
        module.enter_source_scales()
    vars(model)[_STORED] = stored


def leave_source_scales(model: Any) -> None:
    """Return a model without adapters to the scales in which it is stored."""
    for name, value in vars(model).pop(_STORED, {}).items():
        with torch.no_grad():
            model.get_parameter(name).copy_(value)
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.leave_source_scales()
