"""Resolves the targets of an adapter configuration in a packed model, or rejects them.

Experts hold parameters, which peft targets with `target_parameters`. If `target_modules` names experts (`experts`) or
their projections (`gate_proj`, `up_proj`, `down_proj`), and peft does not know the architecture's names, the parameters
are added to `target_parameters`. The saved configuration contains them.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from moepack.errors import UnsupportedModelError
from moepack.integrations.lora.appearance import expert_parameters
from moepack.integrations.refusals import (
    is_adaptable,
    refuse,
    refuse_for_parameters,
    refuse_replication,
    refuse_rotated,
    refuse_settings,
    refuse_training,
)
from moepack.modules.experts import PackedSwitchExperts
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule

__all__ = ["check", "prepared"]

_ALL_LINEAR = "all-linear"


@contextmanager
def prepared(tuner: Any, model: nn.Module, adapter_name: str, by_state: bool) -> Iterator[None]:
    """Prepare a packed model for peft's own injection.

    Args:
        tuner: the tuner of peft.
        model: the model to adapt.
        adapter_name: key of the configuration in `tuner.peft_config`.
        by_state: whether the names of saved weights select the targets, not the configuration.

    Raises:
        UnsupportedModelError: a target cannot be adapted. The model is unchanged.
    """
    config = tuner.peft_config[adapter_name]
    if _method(config) != "LORA":
        check(tuner, config, model)
        yield
        return
    with expert_parameters(model):
        everything = _is_all_linear(config)
        if not by_state:
            _resolve(tuner, config, model)
        _check_lora(tuner, config, model, everything)
        from moepack.integrations.lora import accept_packed

        accept_packed(config)
        yield


def check(tuner: Any, config: Any, model: nn.Module) -> None:
    """Check that no method of peft other than LoRA targets a packed module.

    Raises:
        UnsupportedModelError: a packed module is targeted.
    """
    refuse_rotated(config, model)
    refuse_training(config, model)
    if _method(config) == "LORA" or not hasattr(config, "target_modules"):
        return
    everything = _is_all_linear(config)
    asked = tuner._prepare_adapter_config(copy.copy(config), tuner.get_model_config(model))
    asked = _with_linear(asked, model)
    for path, module in _packed(model):
        if _is_asked(tuner, asked, path, module, everything):
            refuse(path, module, _method(config))


def _method(config: Any) -> str:
    method = config.peft_type
    return str(getattr(method, "value", method))


def _is_all_linear(config: Any) -> bool:
    asked = getattr(config, "target_modules", None)
    return isinstance(asked, str) and asked.lower() == _ALL_LINEAR


def _with_linear(config: Any, model: nn.Module) -> Any:
    """Return the configuration with "all-linear" replaced by the names of all linear layers."""
    from peft.tuners import tuners_utils

    return tuners_utils._maybe_include_all_linear_layers(config, model)


def _packed(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the packed modules with their paths, ignoring adapters around them."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, PackedModule)]
    return [(path.replace(".base_layer", ""), module) for path, module in found]


def _resolve(tuner: Any, config: Any, model: nn.Module) -> None:
    """Complete a LoRA configuration: by peft's rules in peft's order, then with the names of packed experts."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    if hasattr(getattr(model, "config", None), "model_type"):
        rules = get_model_conversion_mapping(model)
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=rules)
        except ValueError as error:  # the configuration names one of two projections that share a parameter
            message = f"packed experts accept the same adapters as unpacked ones: {error}"
            raise UnsupportedModelError(message) from error
    tuner._prepare_adapter_config(config, tuner.get_model_config(model))
    if config.target_modules and not _is_all_linear(config):
        _add_parameters(tuner, config, model)


def _add_parameters(tuner: Any, config: Any, model: nn.Module) -> None:
    """Translate the names of packed experts and their projections into parameter names."""
    experts = [(path, module) for path, module in _packed(model) if module.stock and is_adaptable(module)]
    pairs = [(path, module, parameter) for path, module in experts for parameter in module.stock]
    named = [f"{path}.{name}" for path, module, name in pairs if _is_named(tuner, config, path, module, name)]
    if not named:
        return
    config.target_parameters = [*dict.fromkeys([*(config.target_parameters or ()), *named])]
    paths = {path for path, _ in experts}
    others = [path for path, _ in model.named_modules() if path and path not in paths]
    if isinstance(config.target_modules, str):
        config.target_modules = {path for path in others if _is_target(tuner, config, path)}
    else:
        config.target_modules = {
            name for name in config.target_modules if any(f".{path}".endswith(f".{name}") for path in others)
        }


def _is_named(tuner: Any, config: Any, path: str, module: PackedModule, parameter: str) -> bool:
    """Return whether `target_modules` names a parameter of packed experts, its module, or all of its projections.

    Raises:
        UnsupportedModelError: it names only some of the projections.
    """
    assert module.form is not None
    if any(_is_target(tuner, config, name) for name in (path, f"{path}.{parameter}")):
        return True
    projections = [name for name, place in module.form.places.items() if place.parameter == parameter]
    missing = [name for name in projections if not _is_target(tuner, config, f"{path}.{name}")]
    if missing and len(missing) < len(projections):
        why = f"{' and '.join(projections)} share the parameter {parameter}; also name {missing[0]}"
        raise UnsupportedModelError(f"'{path}' is packed in the layout of transformers, where {why}")
    return not missing


def _names(tuner: Any, config: Any, path: str, module: PackedModule) -> bool:
    """Return whether a configuration names a packed module, its projections or its parameters."""
    below = dict.fromkeys([*module.stock, *(module.form.places if module.form else ()), *module.projections])
    names = [path] if isinstance(module, PackedLinear) else [path, *(f"{path}.{name}" for name in below)]
    names += _linear_names(path, module)
    parameters = getattr(config, "target_parameters", None) or ()
    return any(
        _is_target(tuner, config, name) or any(f".{name}".endswith(f".{parameter}") for parameter in parameters)
        for name in names
    )


def _is_asked(tuner: Any, config: Any, path: str, module: PackedModule, everything: bool) -> bool:
    """Return whether a module that takes no adapter is targeted, by name or as a linear layer of "all-linear"."""
    linear = _linear_names(path, module)
    if not (_names(tuner, config, path, module) or (everything and linear)):
        return False
    alone = copy.copy(config)  # check whether it excludes the module or its layer
    alone.target_modules = [path, *linear]
    return all(_is_target(tuner, alone, name) for name in alone.target_modules)


def _linear_names(path: str, module: PackedModule) -> list[str]:
    """Return the paths of the linear layers of the first Switch expert; empty for other modules."""
    if not isinstance(module, PackedSwitchExperts):
        return []
    return [f"{path}.expert_0.{projection}" for projection in module.projections]


def _is_target(tuner: Any, config: Any, name: str) -> bool:
    """Return whether `target_modules` names a module."""
    return bool(config.target_modules) and bool(tuner._check_target_module_exists(config, name))


def _check_lora(tuner: Any, config: Any, model: nn.Module, everything: bool) -> None:
    """Check that LoRA can adapt all of its targets.

    Raises:
        UnsupportedModelError: it cannot adapt a target.
    """
    refuse_training(config, model)
    refuse_replication(config, model)
    asked = _with_linear(copy.copy(config), model)
    for path, module in _packed(model):
        if not is_adaptable(module):
            if _is_asked(tuner, asked, path, module, everything):
                refuse(path, module, "LORA")
            continue
        if _names(tuner, asked, path, module):
            refuse_settings(config, path)
        if module.stock:
            _check_parameters(config, path, module)


def _check_parameters(config: Any, path: str, module: PackedModule) -> None:
    """Check `target_parameters` against the parameters of packed experts.

    Raises:
        UnsupportedModelError: it names a projection that is not a parameter of its own, or parameters with settings
            that peft supports only for modules.
    """
    assert module.form is not None
    wanted = config.target_parameters or ()
    if any(f".{path}.{name}".endswith(f".{parameter}") for name in module.stock for parameter in wanted):
        refuse_for_parameters(config, path)
    for projection in module.form.places:
        if projection not in module.stock and any(name.endswith(f"experts.{projection}") for name in wanted):
            there = " and ".join(module.stock)
            raise UnsupportedModelError(f"'{path}' is packed and has the parameters {there}, but no {projection}")
