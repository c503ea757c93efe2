"""LoRA for packed models with peft (the extra `train`).

peft adapts a packed model in the same way as an unpacked one (`moepack.integrations.peft`). Packed linear layers and
the parameters of packed experts keep their names, shapes and adapters, so an adapter trained on packed weights loads on
unpacked ones, and vice versa.

    model = get_peft_model(moepack.load(directory), LoraConfig(target_modules="all-linear"))

Packed weights never change, so an adapter cannot be merged into them. `moepack export --adapter` writes decoded weights
with an adapter merged.
"""

from peft import LoraConfig

from moepack.integrations import register
from moepack.integrations.lora.layers import LAYERS, PackedLoraLinear, ParamWrapper

__all__ = ["LAYERS", "PackedLoraLinear", "ParamWrapper", "accept_packed"]

register()


def accept_packed(config: LoraConfig) -> LoraConfig:
    """Register moepack's LoRA layers with a configuration, and return it.

    Calling it is optional: peft's entry points do the same for every configuration.
    """
    config._register_custom_module(LAYERS)
    return config
