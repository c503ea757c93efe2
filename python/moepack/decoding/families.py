"""The architectures that the core decodes, and the properties that cannot be read from their modules.

`moepack.decoding.translation` reads a model module by module. A class name determines what the class computes, because
the classes of a family come from one file of transformers. Properties that attributes expose (sizes, biases, norms of
heads, expert groups) are not repeated here.
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
        classes: the prefix of its class names, relative to `transformers.models`.
        model, sparse, router, rotary: class name suffixes of the model, sparse block, router and rotary positions.
        order: how rotary positions pair values (`_core.Decoder`); the configuration's `rope_interleave` overrides it.
        folded: whether the rotary positions give one value for each pair of values instead of two.
        norm_offset: a constant added to the weights of norms.
        gated: whether the query projection also produces gates for the outputs of heads.
        sigmoid: whether the router scores experts by sigmoid instead of softmax.
        summed: the number of top scores that are summed to score an expert group.
        normalized: whether expert weights of a token always or never sum to one; None if the router specifies it.
    """

    classes: str
    model: str = "Model"
    sparse: str = "SparseMoeBlock"
    router: str = "TopKRouter"
    rotary: str = "RotaryEmbedding"
    order: str = "halves"
    folded: bool = False
    norm_offset: float = 0.0
    gated: bool = False
    sigmoid: bool = False
    summed: int = 2
    normalized: bool | None = None

    def has(self, module: object, suffix: str) -> bool:
        """Whether a module is an instance of the family's class with the given suffix."""
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
    "gpt_oss": Family("gpt_oss.modeling_gpt_oss.GptOss", sparse="MLP", folded=True, normalized=True),
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
"""Families by transformers' model type."""


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a decoder, identified by its class; None if the core does not decode it."""
    return next((family for family in FAMILIES.values() if family.has(model, family.model)), None)


def decoder_of(model: nn.Module) -> Any:
    """Return the part of a model that runs all layers; in multimodal models, that of the text."""
    base: Any = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    text = getattr(base, "language_model", base)
    return text if family_of(text) is not None else base
