"""Makes peft adapt packed models in the same way as unpacked ones.

All entry points (`get_peft_model`, `PeftModel.from_pretrained`, `AutoPeftModel...`, transformers' `load_adapter` and
`add_adapter`) call `BaseTuner.inject_adapter`, which this module wraps. Models without packed modules are passed
through unchanged. For packed models:

- While peft searches for target modules, it sees packed linear layers and the parameters of packed experts
  (`moepack.integrations.lora.appearance`). Its own rules apply, including "all-linear".
- Unsupported targets are rejected before the model changes (`moepack.integrations.refusals`).
- LoRA uses layers that compute next to packed weights (`moepack.integrations.lora`).
- While a model has adapters, it runs in the scales of its source (`moepack.integrations.lora.scales`).

Prompt tuning adapts no layers, but finds the embedding by its shape; it is shown a packed embedding's shape.

The functions here run as soon as a module of peft is imported, possibly while peft itself is still being imported.
Therefore this module imports nothing from peft at the top.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["install", "install_prompts"]

_TUNERS = "peft.tuners.tuners_utils"
_LINEAR = "_maybe_include_all_linear_layers"
"""The function of peft that resolves `target_modules="all-linear"`."""


def install() -> None:
    """Wrap the functions of peft that handle packed modules. A reloaded moepack replaces the old wrappers."""
    tuners = sys.modules[_TUNERS]
    _wrap(tuners.BaseTuner, "__init__", _begin)
    _wrap(tuners.BaseTuner, "inject_adapter", _inject)
    _wrap(tuners.BaseTuner, "_check_merge_allowed", _check_merge)
    _wrap(tuners.BaseTuner, "_unload_and_optionally_merge", _unload)
    known = getattr(tuners, _LINEAR)
    wrapped = _wrap(tuners, _LINEAR, _include_linear)
    for name, module in [*sys.modules.items()]:  # modules of peft that import the function by name
        if name.startswith("peft.") and getattr(module, _LINEAR, None) is known:
            setattr(module, _LINEAR, wrapped)


def install_prompts() -> None:
    """Wrap the method that finds the embedding for prompt tuning."""
    _wrap(sys.modules["peft.peft_model"].PeftModel, "_setup_prompt_encoder", _set_up_prompts)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by `wrapper(original, *args, **kwargs)`. Wrapping twice keeps the first original."""
    original = getattr(owner, name)
    original = getattr(original, "_moepack_original", original)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._moepack_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return wrapped


def _is_packed(model: Any) -> bool:
    """Return whether a model has packed modules, without importing their code."""
    packed = sys.modules.get("moepack.stores.module")
    return packed is not None and any(isinstance(module, packed.PackedModule) for module in model.modules())


def _is_adapted(model: Any) -> bool:
    """Return whether a model has layers of peft."""
    layer = sys.modules[_TUNERS].BaseTunerLayer
    return any(isinstance(module, layer) for module in model.modules())


def _begin(
    original: Callable[..., None],
    tuner: Any,
    model: Any,
    peft_config: Any,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    if _is_packed(model):
        from moepack.integrations.lora.injection import check

        # Check first: some tuners inspect the model in `__init__` and fail on packed modules with obscure errors.
        check(tuner, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config, model)
    original(tuner, model, peft_config, adapter_name, *args, **kwargs)


def _inject(
    original: Callable[..., None], tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    if not _is_packed(model):
        return original(tuner, model, adapter_name, *args, **kwargs)
    from moepack.integrations.lora.injection import prepared
    from moepack.integrations.lora.scales import enter_source_scales, leave_source_scales

    enter_source_scales(model)
    try:
        with prepared(tuner, model, adapter_name, by_state=kwargs.get("state_dict") is not None):
            return original(tuner, model, adapter_name, *args, **kwargs)
    except BaseException:
        if not _is_adapted(model):
            leave_source_scales(model)
        raise


def _check_merge(original: Callable[..., None], tuner: Any) -> None:
    original(tuner)
    if _is_packed(tuner.model):
        from moepack.integrations.refusals import refuse_merging

        refuse_merging(tuner.model)


def _unload(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    model = original(tuner, *args, **kwargs)
    if _is_packed(model):
        from moepack.integrations.lora.scales import leave_source_scales

        leave_source_scales(model)
    return model


def _set_up_prompts(original: Callable[..., None], model: Any, adapter_name: str) -> None:
    if not _is_packed(model):
        original(model, adapter_name)
        return
    from moepack.integrations.lora.appearance import embedding_weights

    with embedding_weights(model):
        original(model, adapter_name)


def _include_linear(original: Callable[..., Any], peft_config: Any, model: Any) -> Any:
    if not _is_packed(model):
        return original(peft_config, model)
    from moepack.integrations.lora.appearance import linear_layers

    with linear_layers(model):
        return original(peft_config, model)
