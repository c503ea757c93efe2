"""What peft cannot do with packed weights, in sentences, said before a model is changed."""

from typing import Any, NoReturn

from torch import nn

from moepack.errors import UnsupportedModelError
from moepack.runtime.embedding import PackedEmbedding
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule

__all__ = [
    "is_adaptable",
    "merge_refusal",
    "refuse",
    "refuse_for_parameters",
    "refuse_merging",
    "refuse_replication",
    "refuse_settings",
    "refuse_training",
]

_NEED_WEIGHTS = {
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Settings of `LoraConfig` that have no layer beside packed weights, and what people call them."""

_FOR_MODULES = {
    "lora_dropout": "lora_dropout=0.0",
    "use_dora": "use_dora=False",
    "lora_bias": "lora_bias=False",
    "fan_in_fan_out": "fan_in_fan_out=False",
}
"""Settings of `LoraConfig` that peft has for modules and not for parameters, with the values that it takes."""

_PLAIN_STARTS = (True, False, "gaussian", "eva")
"""Values of `init_lora_weights` for which the weights are neither read nor changed."""


def is_adaptable(module: PackedModule) -> bool:
    """Whether LoRA can stand beside a packed module."""
    if isinstance(module, PackedLinear):
        return True
    return module.takes_adapters and bool(module.stock) and not any("." in name for name in module.stock)


def refuse(path: str, module: PackedModule, method: str) -> NoReturn:
    """Raise that a module takes no adapter of a method of peft.

    Raises:
        UnsupportedModelError: always.
    """
    if method != "LORA":
        why = f"is packed, and packed weights take adapters of LoRA, none of {method}"
    elif isinstance(module, PackedEmbedding):
        why = "is a packed embedding, which takes no adapters"
    else:
        why = f"is a layer of packed experts that takes no adapters ({type(module).__name__})"
    raise UnsupportedModelError(f"'{path}' {why}; leave it out by exclude_modules, or name other modules")


def refuse_settings(config: Any, path: str) -> None:
    """Raise if LoRA is to be computed, or to start, from the weights of a packed layer.

    Raises:
        UnsupportedModelError: it is.
    """
    wanted = next((name for setting, name in _NEED_WEIGHTS.items() if getattr(config, setting, None)), None)
    if wanted is not None:
        raise UnsupportedModelError(f"'{path}' is packed, and {wanted} needs weights as numbers; plain LoRA does not")
    if (start := config.init_lora_weights) not in _PLAIN_STARTS:
        message = f"'{path}' is packed, and init_lora_weights={start!r} needs weights as numbers; True does not"
        raise UnsupportedModelError(message)


def refuse_for_parameters(config: Any, path: str) -> None:
    """Raise if LoRA of experts is to do what peft does for modules alone; experts are parameters.

    Raises:
        UnsupportedModelError: it is.
    """
    wanted = next((setting for setting in _FOR_MODULES if getattr(config, setting, None)), None)
    if wanted is not None:
        raise UnsupportedModelError(
            f"'{path}' holds its experts in parameters, for which peft has no {wanted}; set {_FOR_MODULES[wanted]}, "
            "or leave the experts out"
        )


def refuse_replication(config: Any, model: nn.Module) -> None:
    """Raise if layers are to be repeated, which copies packed bytes.

    Raises:
        UnsupportedModelError: they are.
    """
    if getattr(config, "layer_replication", None):
        path = next(path for path, module in model.named_modules() if isinstance(module, PackedModule))
        raise UnsupportedModelError(f"'{path}' is packed, and layer_replication repeats layers without packed weights")


def refuse_training(config: Any, model: nn.Module) -> None:
    """Raise if packed weights themselves are to be trained.

    Raises:
        UnsupportedModelError: they are named by `modules_to_save` or `trainable_token_indices`.
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
    """What is raised where an adapter is to be merged."""
    return RuntimeError(
        "an adapter cannot be merged into packed weights: save it beside them, or write decoded weights with it by "
        "`moepack export PACKED OUT --adapter DIR`"
    )


def refuse_merging(model: nn.Module) -> None:
    """Raise if an adapter stands beside a packed module.

    Raises:
        RuntimeError: one does.
    """
    if any(isinstance(getattr(module, "base_layer", None), PackedModule) for module in model.modules()):
        raise merge_refusal()
