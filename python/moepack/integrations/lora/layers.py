"""LoRA layers beside packed weights, with the constructor arguments that peft passes."""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as StockWrapper
from peft.tuners.lora.variants import ALoraLinearVariant, ArrowLinearVariant, DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from moepack.integrations.lora.refusals import merge_refusal
from moepack.runtime.adapters import NONE, Adapters, by_projection
from moepack.runtime.experts import PackedExpertProducts, PackedExperts, PackedOwnExperts
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule

__all__ = ["LAYERS", "PackedLoraLinear", "ParamWrapper"]


class PackedLoraLinear(lora.Linear):  # type: ignore[misc]
    """`y = W x + b + scaling B A x` with a packed W."""

    def _get_in_out_features(self, module: PackedLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> Mapping[tuple[str, ...], Any]:
        """The variants of LoRA that change no weights; DoRA decodes them at each call."""
        return {
            (): None,
            ("use_dora",): DoraLinearVariant,
            ("alora_invocation_tokens",): ALoraLinearVariant,
            ("arrow_config",): ArrowLinearVariant,
        }

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: packed weights never change."""
        raise merge_refusal()


class ParamWrapper(StockWrapper):  # type: ignore[misc]
    """Adapters of a parameter that stands for packed experts: `W + scaling B A` for each expert, W packed.

    Their weights have the names and shapes of peft's `ParamWrapper`, by whose name peft finds such layers again.
    """

    def get_param(self) -> torch.Tensor:
        """The parameter without memory: its shape is known, its values are packed."""
        return torch.empty(self.get_base_layer().stock[self.parameter_name], device="meta")

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        BaseTunerLayer._move_adapter_to_device_of_base_layer(self, adapter_name, device)

    def forward(self, x: torch.Tensor, *arguments: Any, adapters: Adapters = NONE, **settings: Any) -> torch.Tensor:
        """Run the experts with the active adapters.

        Args:
            x, *arguments, **settings: what the experts module is called with.
            adapters: those of the experts' other parameters, from a wrapper around this one.
        """
        self._check_forward_args(x, *arguments, **settings)
        experts: PackedModule = self.get_base_layer()
        assert experts.form is not None
        found = {name: [*each] for name, each in adapters.items()}
        for adapter in () if self.disable_adapters else self.active_adapters:
            if adapter in self.lora_A:
                added = by_projection(experts.form, self.parameter_name, *self.get_delta_factors(adapter))
                for projection, factors in added.items():
                    found.setdefault(projection, []).append(factors)
        outputs: torch.Tensor = self.base_layer(x, *arguments, adapters=found, **settings)
        return outputs

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: packed weights never change."""
        raise merge_refusal()


LAYERS: Mapping[type[nn.Module], type[LoraLayer]] = {
    PackedLinear: PackedLoraLinear,
    **dict.fromkeys((PackedExperts, PackedOwnExperts, PackedExpertProducts), ParamWrapper),
}
"""The layer of LoRA for each module."""
