"""The architectures that GGUF export supports, by transformers' model type."""

from moepack.errors import UnsupportedModelError
from moepack.export.gguf.latent import LatentModel
from moepack.export.gguf.model import Config, Model

__all__ = ["MODELS", "model_of"]

_WIDTH = {"add_expert_feed_forward_length": "moe_intermediate_size"}

MODELS: dict[str, Model] = {
    "mixtral": Model("llama", interleaved=True),
    "qwen2_moe": Model(
        "qwen2moe",
        {"norm_topk_prob": (False,), "qkv_bias": (True,)},
        {**_WIDTH, "add_expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3_moe": Model("qwen3moe", {"norm_topk_prob": (True,), "attention_bias": (False,)}, _WIDTH),
    "deepseek_v2": LatentModel(
        "deepseek2",
        {"attention_bias": (False,), "mlp_bias": (False,), "norm_topk_prob": (False,), "topk_method": ("greedy",)},
        {
            **_WIDTH,
            "add_expert_shared_count": "n_shared_experts",
            "add_expert_weights_scale": "routed_scaling_factor",
            "add_leading_dense_block_count": "first_k_dense_replace",
            "add_kv_lora_rank": "kv_lora_rank",
        },
        scalings=("default", "yarn"),
    ),
    "olmoe": Model("olmoe", {"norm_topk_prob": (False,), "attention_bias": (False,)}, grouped=False),
}


def model_of(config: Config) -> Model:
    """Return llama.cpp's counterpart of a configuration, after checking that it computes the same.

    Raises:
        UnsupportedModelError: it does not, or the architecture is not in `MODELS`.
    """
    name = config.get("model_type")
    if name not in MODELS:
        message = f"GGUF export supports {', '.join(MODELS)}, not '{name}'; `--to bf16` supports any architecture"
        raise UnsupportedModelError(message, file="config.json")
    MODELS[name].refuse(config)
    return MODELS[name]
