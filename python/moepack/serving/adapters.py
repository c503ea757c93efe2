"""The low-rank adapters of a served model. Each sequence uses one of them or none.

All adapters are loaded next to the weights, packed or not, which never change. One is active at a time: a step runs the
parts of each adapter in a pass of their own, because layers apply the active adapter to all tokens of a pass. Keys and
values depend on the adapter, too.
"""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moepack.errors import LoadError, MoepackError

__all__ = ["Adapters"]


class Adapters:
    """The adapters of a model, by name.

    Args:
        model: a loaded model. Its layers are replaced by layers with adapters, none of which is active.
        directories: the directory of each adapter, as peft saves it.

    Raises:
        LoadError: peft is not installed, or a directory is not a LoRA adapter for this model.
        UnsupportedModelError: an adapter targets a layer that cannot be adapted.
    """

    def __init__(self, model: Any, directories: Mapping[str, Path] | None = None) -> None:
        self._keys: dict[str, str] = {}  # peft's names, which must not contain dots
        self._active: str | None = None
        adapted: Any = None
        for number, (name, directory) in enumerate((directories or {}).items()):
            self._keys[name] = f"adapter{number}"
            try:
                adapted = _loaded(adapted, model, directory, self._keys[name])
            except MoepackError:
                raise
            except Exception as error:  # peft and safetensors raise all kinds
                raise LoadError(f"{directory}: the adapter does not fit the model: {error}") from error
        self._peft = adapted
        if self._keys:
            self._peft.eval()
            self._peft.base_model.disable_adapter_layers()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self._keys)

    @property
    def active(self) -> str | None:
        """The name of the active adapter; None if the model runs without."""
        return self._active

    def activate(self, name: str | None) -> None:
        """Activate an adapter; None runs the model without."""
        if name == self._active:
            return
        if name is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(self._keys[name])
        self._active = name


def _loaded(adapted: Any, model: Any, directory: Path, key: str) -> Any:
    """Load an adapter into a model; return peft's model, which is None before the first adapter."""
    if find_spec("peft") is None:
        raise LoadError("adapters need peft: pip install 'moepack[train]'")
    from peft import PeftConfig, PeftModel

    if not (directory / "adapter_config.json").is_file():
        raise LoadError(f"{directory}: there is no adapter_config.json")
    config = PeftConfig.from_pretrained(str(directory))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA" or getattr(config, "alora_invocation_tokens", None):
        kind = "activated LoRA" if kind == "LORA" else kind
        raise LoadError(f"{directory}: only LoRA adapters can be served, and this is {kind}")
    with warnings.catch_warnings():
        # peft leaves adapters whose weights are missing at their random initial values.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        if adapted is None:
            return PeftModel.from_pretrained(model, str(directory), adapter_name=key)
        adapted.load_adapter(str(directory), adapter_name=key)
    return adapted
