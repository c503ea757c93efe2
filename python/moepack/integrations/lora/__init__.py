"""LoRA beside packed weights, for peft (the extra `train`).

peft adapts a packed model as the unpacked one, through any of its doors (`moepack.integrations.peft`): packed linear
layers and the parameters of packed experts have the names, the shapes and the adapters that they have there, so an
adapter that was trained beside packed weights loads beside unpacked ones, and the other way round.

    model = get_peft_model(moepack.load(directory), LoraConfig(target_modules="all-linear"))

Packed weights never change, so an adapter cannot be merged into them; `moepack export --adapter` writes decoded weights
with an adapter merged.
"""

from peft import LoraConfig

from moepack.integrations import register
from moepack.integrations.lora.layers import LAYERS, PackedLoraLinear, ParamWrapper

__all__ = ["LAYERS", "PackedLoraLinear", "ParamWrapper", "accept_packed"]

register()


def accept_packed(config: LoraConfig) -> LoraConfig:
    """Let a configuration of LoRA target packed layers, and return it.

    Nothing else needs it: peft's doors give every configuration the same layers.
    """
    config._register_custom_module(LAYERS)
    return config
