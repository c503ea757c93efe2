"""What peft asks of a model, answered for packed ones: every door of peft adapts a packed model as the unpacked one.

All doors (`get_peft_model`, `PeftModel.from_pretrained`, `AutoPeftModel...`, transformers' `load_adapter` and
`add_adapter`) end in `BaseTuner.inject_adapter`, whose call is wrapped here. Models without packed modules pass through
untouched. For others

- packed linear layers and the parameters of packed experts are shown to peft while it looks for what it adapts
  (`moepack.integrations.lora.appearance`), so its own rules decide, "all-linear" included;
- what cannot be adapted is refused before anything in the model is changed (`moepack.integrations.lora.refusals`);
- LoRA gets layers that compute beside packed weights (`moepack.integrations.lora`).

Prompt tuning, which adapts no layers, looks for the embedding by its shape; it is shown a packed one.

The functions here are called as soon as a module of peft has been imported, while peft itself may still be importing.
Hence nothing of peft is imported at the top.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["install", "install_prompts"]

_TUNERS = "peft.tuners.tuners_utils"
_LINEAR = "_maybe_include_all_linear_layers"
"""What resolves `target_modules="all-linear"`."""


def install() -> None:
    """Wrap the functions of peft that meet packed modules; a reloaded moepack replaces the old one."""
    tuners = sys.modules[_TUNERS]
    _wrap(tuners.BaseTuner, "__init__", _begin)
    _wrap(tuners.BaseTuner, "inject_adapter", _inject)
    _wrap(tuners.BaseTuner, "_check_merge_allowed", _check_merge)
    known = getattr(tuners, _LINEAR)
    wrapped = _wrap(tuners, _LINEAR, _include_linear)
    for name, module in [*sys.modules.items()]:  # methods of peft that have imported the function by its name
        if name.startswith("peft.") and getattr(module, _LINEAR, None) is known:
            setattr(module, _LINEAR, wrapped)


def install_prompts() -> None:
    """Wrap what looks for the embedding that virtual tokens stand beside."""
    _wrap(sys.modules["peft.peft_model"].PeftModel, "_setup_prompt_encoder", _set_up_prompts)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Put `wrapper(original, *args, **kwargs)` in the place of a function, once."""
    original = getattr(owner, name)
    original = getattr(original, "_moepack_original", original)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._moepack_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return wrapped


def _is_packed(model: Any) -> bool:
    """Whether a model has packed modules, which it has not where their code was never imported."""
    packed = sys.modules.get("moepack.runtime.packed")
    return packed is not None and any(isinstance(module, packed.PackedModule) for module in model.modules())


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

        # Before methods that look at the model by themselves answer for one that they do not understand.
        check(tuner, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config, model)
    original(tuner, model, peft_config, adapter_name, *args, **kwargs)


def _inject(
    original: Callable[..., None], tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    if not _is_packed(model):
        return original(tuner, model, adapter_name, *args, **kwargs)
    from moepack.integrations.lora.injection import prepared

    with prepared(tuner, model, adapter_name, by_state=kwargs.get("state_dict") is not None):
        return original(tuner, model, adapter_name, *args, **kwargs)


def _check_merge(original: Callable[..., None], tuner: Any) -> None:
    original(tuner)
    if _is_packed(tuner.model):
        from moepack.integrations.lora.refusals import refuse_merging

        refuse_merging(tuner.model)


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
