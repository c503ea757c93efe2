"""LoRA layers for packed modules, with the constructor arguments that peft passes."""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as StockWrapper
from peft.tuners.lora.variants import ALoraLinearVariant, ArrowLinearVariant, DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from moepack.integrations.refusals import merge_refusal
from moepack.modules.adapters import NONE, Adapters, LowRank, by_projection
from moepack.modules.experts import PackedExpertProducts, PackedExperts, PackedOwnExperts
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule

__all__ = ["LAYERS", "PackedLoraLinear", "ParamWrapper"]


class PackedLoraLinear(lora.Linear):  # type: ignore[misc]
    """`y = W x + b + scaling B A x` with a packed W."""

    def _get_in_out_features(self, module: PackedLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> Mapping[tuple[str, ...], Any]:
        """The LoRA variants that do not change the weights. DoRA decodes them at each call."""
        return {
            (): None,
            ("use_dora",): DoraLinearVariant,
            ("alora_invocation_tokens",): ALoraLinearVariant,
            ("arrow_config",): ArrowLinearVariant,
        }

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise a `RuntimeError`: packed weights never change."""
        raise merge_refusal()


class ParamWrapper(StockWrapper):  # type: ignore[misc]
    """Adapters of a parameter of packed experts: `W + scaling B A` for each expert, with a packed W.

    The adapter weights have the names and shapes of peft's `ParamWrapper`. peft finds such layers by the class name.
    They are in the scales of the model's source (`scales`).
    """

    def get_param(self) -> torch.Tensor:
        """Return the parameter on the meta device: only its shape is known, its values are packed."""
        return torch.empty(self.get_base_layer().stock[self.parameter_name], device="meta")

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        BaseTunerLayer._move_adapter_to_device_of_base_layer(self, adapter_name, device)

    def forward(self, x: torch.Tensor, *arguments: Any, adapters: Adapters = NONE, **settings: Any) -> torch.Tensor:
        """Run the experts with the active adapters.

        Args:
            x, *arguments, **settings: arguments of the experts module.
            adapters: adapters of the experts' other parameters, passed by a wrapper around this one.
        """
        self._check_forward_args(x, *arguments, **settings)
        found = {name: [*each] for name, each in adapters.items()}
        for adapter in () if self.disable_adapters else self.active_adapters:
            if adapter in self.lora_A:
                for projection, factors in self.factors(adapter).items():
                    found.setdefault(projection, []).append(factors)
        outputs: torch.Tensor = self.base_layer(x, *arguments, adapters=found, **settings)
        return outputs

    def factors(self, adapter: str) -> dict[str, LowRank]:
        """Return the factors of an adapter by projection, in the scales of the packed weights."""
        experts: PackedModule = self.get_base_layer()
        assert experts.form is not None
        added = by_projection(experts.form, self.parameter_name, *self.get_delta_factors(adapter))
        return {name: factors.scaled(*experts.scales(name)) for name, factors in added.items()}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise a `RuntimeError`: packed weights never change."""
        raise merge_refusal()


LAYERS: Mapping[type[nn.Module], type[LoraLayer]] = {
    PackedLinear: PackedLoraLinear,
    **dict.fromkeys((PackedExperts, PackedOwnExperts, PackedExpertProducts), ParamWrapper),
}
"""The LoRA layer class of each packed module class."""
