"""Error messages for adapter settings that packed weights do not support, raised before a model is changed.

The module does not need peft, because commands that accept adapters import it without peft, too.
"""

import os
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from moepack.errors import LoadError, UnsupportedModelError
from moepack.format.hub import ADAPTER
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule

__all__ = [
    "is_adaptable",
    "merge_refusal",
    "refuse",
    "refuse_for_parameters",
    "refuse_merging",
    "refuse_replication",
    "refuse_rotated",
    "refuse_settings",
    "refuse_start",
    "refuse_training",
    "require_adapter",
]

_NEED_WEIGHTS = {
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Settings of `LoraConfig` that packed layers do not support, and the names of the techniques."""

_FOR_MODULES = {
    "lora_dropout": "lora_dropout=0.0",
    "use_dora": "use_dora=False",
    "lora_bias": "lora_bias=False",
    "fan_in_fan_out": "fan_in_fan_out=False",
}
"""Settings of `LoraConfig` that peft supports for modules but not for parameters, with the accepted values."""

_PLAIN_STARTS = (True, False, "gaussian", "eva")
"""Values of `init_lora_weights` that neither read nor change the weights."""


def is_adaptable(module: PackedModule) -> bool:
    """Return whether LoRA can adapt a packed module."""
    if isinstance(module, PackedLinear):
        return True
    return module.takes_adapters and bool(module.stock) and not any("." in name for name in module.stock)


def require_adapter(directory: Path) -> None:
    """Check that a directory holds an adapter. Without this, peft looks for it on the Hub.

    Raises:
        LoadError: it holds none.
    """
    if not (directory / ADAPTER).is_file():
        raise LoadError(f"there is no {ADAPTER}", file=directory)


def refuse(path: str, module: PackedModule, method: str) -> NoReturn:
    """Raise the error for a module that does not accept adapters of this method.

    Raises:
        UnsupportedModelError: always.
    """
    if method != "LORA":
        why = f"is packed, and packed weights accept only LoRA adapters, not {method}"
    elif isinstance(module, PackedEmbedding):
        why = "is a packed embedding, which takes no adapters"
    else:
        why = f"is a layer of packed experts that takes no adapters ({type(module).__name__})"
    raise UnsupportedModelError(f"'{path}' {why}; list it in exclude_modules, or name other modules")


def refuse_settings(config: Any, path: str) -> None:
    """Check that LoRA neither computes with nor starts from the weights of a packed layer.

    Raises:
        UnsupportedModelError: a setting needs the weights.
    """
    wanted = next((name for setting, name in _NEED_WEIGHTS.items() if getattr(config, setting, None)), None)
    if wanted is not None:
        raise UnsupportedModelError(f"'{path}' is packed, and {wanted} needs unpacked weights; plain LoRA does not")
    if (start := config.init_lora_weights) not in _PLAIN_STARTS:
        message = f"'{path}' is packed, and init_lora_weights={start!r} needs unpacked weights; True does not"
        raise UnsupportedModelError(message)


def refuse_start(config: Any, directory: os.PathLike[str]) -> None:
    """Check that the base weights were not changed when a saved adapter was created (PiSSA, OLoRA).

    Raises:
        UnsupportedModelError: they were. peft can save such an adapter in a form for the original weights.
    """
    if (start := getattr(config, "init_lora_weights", True)) not in _PLAIN_STARTS:
        message = f"init_lora_weights={start!r} changed the weights that the adapter belongs to; save it with peft's "
        raise UnsupportedModelError(f"{message}path_initial_model_for_weight_conversion", file=directory)


def refuse_for_parameters(config: Any, path: str) -> None:
    """Check that LoRA of experts, which are parameters, uses no setting that peft supports only for modules.

    Raises:
        UnsupportedModelError: it uses such a setting.
    """
    wanted = next((setting for setting in _FOR_MODULES if getattr(config, setting, None)), None)
    if wanted is not None:
        raise UnsupportedModelError(
            f"'{path}' holds its experts in parameters, for which peft has no {wanted}; set {_FOR_MODULES[wanted]}, "
            "or exclude the experts"
        )


def refuse_replication(config: Any, model: nn.Module) -> None:
    """Check that no layers are replicated, which would copy packed bytes.

    Raises:
        UnsupportedModelError: `layer_replication` is set.
    """
    if getattr(config, "layer_replication", None):
        path = next(path for path, module in model.named_modules() if isinstance(module, PackedModule))
        raise UnsupportedModelError(f"'{path}' is packed, and layer_replication supports only unpacked layers")


def refuse_rotated(config: Any, model: nn.Module) -> None:
    """Check that no adapter of another model is loaded onto a model that was rotated or reordered before it was packed.

    Such a model has another residual stream, or other channels, than its source, and their map was not kept. Adapters
    that were trained on the packed model itself fit.

    Raises:
        UnsupportedModelError: the adapter was trained on another model.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    changes = settings if isinstance(settings, dict) else vars(settings) if settings is not None else {}
    changes = {**changes, **changes.get("settings", {})} if isinstance(changes.get("settings"), dict) else changes
    rotated = str(changes.get("rotation", "none")) != "none"
    if not rotated and not (changes.get("permute") and str(changes.get("block")) != "row"):
        return
    trained, own = getattr(config, "base_model_name_or_path", None), getattr(model, "name_or_path", None)
    if trained is None or os.path.abspath(str(trained)) == os.path.abspath(str(own)):
        return
    change = "rotated" if rotated else "reordered"
    raise UnsupportedModelError(
        f"the adapter was trained on '{trained}', but this model was {change} before it was packed, so only adapters "
        "that were trained on it fit; pack the model with rotation none and without permute"
    )


def refuse_training(config: Any, model: nn.Module) -> None:
    """Check that no packed weights are to be trained themselves.

    Raises:
        UnsupportedModelError: `modules_to_save` or `trainable_token_indices` names packed weights.
    """
    names = tuple(getattr(config, "modules_to_save", None) or ())
    for path, module in model.named_modules():
        if path.endswith(names) and any(isinstance(part, PackedModule) for part in module.modules()):
            raise UnsupportedModelError(
                f"'{path}' is packed and cannot be trained itself; leave it out of modules_to_save"
            )
    if getattr(config, "trainable_token_indices", None) is not None or config.peft_type == "TRAINABLE_TOKENS":
        for path, module in model.named_modules():
            if isinstance(module, PackedEmbedding):
                raise UnsupportedModelError(f"'{path}' is packed, so none of its tokens can be trained")


def merge_refusal() -> RuntimeError:
    """Return the error for merging an adapter into packed weights."""
    return RuntimeError(
        "an adapter cannot be merged into packed weights: save it separately, or write decoded weights with "
        "`moepack export PACKED OUT --adapter DIR`"
    )


def refuse_merging(model: nn.Module) -> None:
    """Check that no adapter is attached to a packed module.

    Raises:
        RuntimeError: an adapter is attached.
    """
    if any(isinstance(getattr(module, "base_layer", None), PackedModule) for module in model.modules()):
        raise merge_refusal()
