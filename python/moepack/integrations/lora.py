"""LoRA beside packed linear layers, for peft (the extra `train`).

peft finds the linear layers that stayed as they were by itself, and trains adapters of them beside packed experts. For
packed linear layers its configuration is told how, by `accept_packed`:

    config = accept_packed(LoraConfig(target_modules=["q_proj", "v_proj"]))
    model = get_peft_model(moepack.load(directory), config)

Packed weights never change, so an adapter cannot be merged into them.
"""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from moepack.runtime.linear import PackedLinear

__all__ = ["PackedLoraLinear", "accept_packed"]


def accept_packed(config: LoraConfig) -> LoraConfig:
    """Let a configuration of LoRA target packed linear layers too, and return it."""
    config._register_custom_module({PackedLinear: PackedLoraLinear})
    return config


class PackedLoraLinear(nn.Module, LoraLayer):  # type: ignore[misc]
    """`y = W x + b + scaling B A x` with a packed W; arguments are those that peft makes its layers with."""

    base_layer: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    scaling: Any
    active_adapters: Any
    disable_adapters: Any
    update_layer: Any

    def __init__(
        self, base_layer: PackedLinear, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1, **_: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: PackedLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x `[..., columns]`, to `[..., rows]` in its dtype."""
        y: torch.Tensor = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            if name in self.lora_A:
                down, up = self.lora_A[name], self.lora_B[name]
                dropped = self.lora_dropout[name](x.to(down.weight.dtype))
                y = y + up(down(dropped)).to(y.dtype) * self.scaling[name]
        return y

    def merge(self, *arguments: Any, **settings: Any) -> None:
        """Refuse: packed weights never change."""
        raise RuntimeError("an adapter cannot be merged into packed weights: save it beside them")
