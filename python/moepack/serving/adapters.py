"""The low-rank adapters of a served model. Each sequence uses one of them or none.

All adapters are loaded next to the weights, packed or not, which never change. A pass runs tokens of several adapters
and of none: they share the products of the weights, and each adapter adds its low-rank part to its own tokens
(`moepack.integrations.lora.mixing`). Where a layer does not allow this, each adapter has a pass of its own. Keys and
values depend on the adapter, too.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moepack.errors import LoadError, MoepackError
from moepack.integrations.refusals import refuse_start, require_adapter

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
                reason = str(error)
                for own, key in self._keys.items():
                    reason = reason.replace(f"'{key}'", f"'{own}'")
                raise LoadError(f"{directory}: the adapter does not fit the model: {reason}") from error
        self._peft = adapted
        self._mixing: Any = None
        if self._keys:
            from moepack.integrations.lora.mixing import Mixing

            self._peft.eval()
            self._peft.base_model.disable_adapter_layers()
            self._mixing = Mixing(model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(self._keys)

    @property
    def active(self) -> str | None:
        """The name of the active adapter; None if the model runs without."""
        return self._active

    @property
    def can_mix(self) -> bool:
        """Whether one pass can run tokens of several adapters."""
        return self._mixing is not None and bool(self._mixing.is_possible)

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

    @contextmanager
    def of(self, names: Sequence[str | None]) -> Iterator[None]:
        """Run passes in this block with the adapter of each token; several need `can_mix`.

        Raises:
            UnmixableError: a layer does not know which tokens it reads. From then on, `can_mix` is False.
        """
        used = {*names}
        if len(used) == 1:
            self.activate(names[0])
            yield
            return
        self.activate(None)
        used.discard(None)
        own = {self._keys[str(name)]: torch.tensor([other == name for other in names]) for name in used}
        with self._mixing.of(own):
            yield


def _loaded(adapted: Any, model: Any, directory: Path, key: str) -> Any:
    """Load an adapter into a model; return peft's model, which is None before the first adapter."""
    if find_spec("peft") is None:
        raise LoadError("adapters need peft: pip install 'moepack[train]'")
    from peft import PeftConfig, PeftModel

    require_adapter(directory)
    config = PeftConfig.from_pretrained(str(directory))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA" or getattr(config, "alora_invocation_tokens", None):
        kind = "activated LoRA" if kind == "LORA" else kind
        raise LoadError(f"{directory}: only LoRA adapters can be served, but this is {kind}")
    refuse_start(config, directory)
    with warnings.catch_warnings():
        # peft leaves adapters whose weights are missing at their random initial values.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        if adapted is None:
            return PeftModel.from_pretrained(model, str(directory), adapter_name=key)
        adapted.load_adapter(str(directory), adapter_name=key)
    return adapted
