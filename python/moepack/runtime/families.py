"""The architectures that the core decodes, and what of them their modules do not say.

`moepack.runtime.plan` reads a model module by module. What a class computes is known by its name, for the classes of a
family are those of one file of transformers; what their attributes say (sizes, biases, norms of heads, groups of
experts) is not repeated here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["FAMILIES", "Family", "decoder_of", "family_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        classes: how the names of its classes begin, below `transformers.models`.
        model, sparse, router, rotary: how those of the model, the sparse block, its router and rotary positions end.
        order: where the two values of a pair lie that rotary positions turn (`_core.Decoder`); `rope_interleave` of
            the configuration says otherwise.
        norm_offset: added to the weights of norms.
        gated: whether queries come with gates of the heads' outputs.
        sigmoid: whether experts are scored by sigmoids, not by a softmax.
        summed: how many of the scores of a group of experts are summed to that of the group.
        normalized: whether the weights of a token's experts always or never sum to one; None where the router says so.
    """

    classes: str
    model: str = "Model"
    sparse: str = "SparseMoeBlock"
    router: str = "TopKRouter"
    rotary: str = "RotaryEmbedding"
    order: str = "halves"
    norm_offset: float = 0.0
    gated: bool = False
    sigmoid: bool = False
    summed: int = 2
    normalized: bool | None = None

    def has(self, module: object, suffix: str) -> bool:
        """Whether a module is of the family's class that ends with `suffix`."""
        return f"{type(module).__module__}.{type(module).__qualname__}" == f"transformers.models.{self.classes}{suffix}"


FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        "deepseek_v2.modeling_deepseek_v2.DeepseekV2",
        sparse="Moe",
        router="TopkRouter",
        order="pairs",
        summed=1,
        normalized=False,
    ),
    "deepseek_v3": Family(
        "deepseek_v3.modeling_deepseek_v3.DeepseekV3", sparse="MoE", router="TopkRouter", sigmoid=True
    ),
    "glm4_moe": Family("glm4_moe.modeling_glm4_moe.Glm4Moe", sparse="MoE", router="TopkRouter", sigmoid=True),
    "gpt_oss": Family("gpt_oss.modeling_gpt_oss.GptOss", sparse="MLP", normalized=True),
    "mixtral": Family("mixtral.modeling_mixtral.Mixtral", normalized=True),
    "olmoe": Family("olmoe.modeling_olmoe.Olmoe"),
    "qwen2_moe": Family("qwen2_moe.modeling_qwen2_moe.Qwen2Moe"),
    "qwen3_5_moe": Family(
        "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5Moe",
        model="TextModel",
        rotary="TextRotaryEmbedding",
        norm_offset=1.0,
        gated=True,
        normalized=True,
    ),
    "qwen3_moe": Family("qwen3_moe.modeling_qwen3_moe.Qwen3Moe"),
    "qwen3_next": Family("qwen3_next.modeling_qwen3_next.Qwen3Next", norm_offset=1.0, gated=True),
}
"""By transformers' model type."""


def family_of(model: nn.Module) -> Family | None:
    """The family whose decoder a model is, by its class."""
    return next((family for family in FAMILIES.values() if family.has(model, family.model)), None)


def decoder_of(model: nn.Module) -> Any:
    """The part of a model that takes tokens through all layers; that of the text, where it has others beside it."""
    base: Any = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    text = getattr(base, "language_model", base)
    return text if family_of(text) is not None else base
