"""Builds a tiny random model of any transformers architecture from its own configuration class.

The configuration's defaults are kept, except sizes, which are recognised by name, and the number of layers: the minimum
that includes one layer of each kind (attention, linear attention, dense, sparse). Further changes that an architecture
needs are listed by name.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["tiny_config", "tiny_model"]

VOCABULARY = 64
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|\w+_vocab_size|vocab_size_per_layer_input|num_embeddings", VOCABULARY),
    (
        r"(?:text_|moe_)?hidden_size|d_model|hidden_dim|embed_dim|n_embd|out_hidden_size|projection_dim|embedding_dim",
        32,
    ),
    (r"\w*(?:intermediate|ffn)\w*(?:size|dim)\w*|d_ff|mlp_hidden_dim", 32),
    (r"(?:moe_)?latent_size|hidden_size_per_layer_input", 32),
    (r"depth|n_layers?|num_layers|num_(?:en|de)coder_layers|(?:en|de)coder_layers", 2),
    (r"num_attention_heads|n_heads?|num_heads|\w+_attention_heads|\w+_num_(?:query_)?heads|num_\w*value_heads", 4),
    (r"num_key_value_heads|kv_n_heads|\w+_num_key_value_heads", 2),
    (r"\w*head_dim\w*", 8),
    (r"(?:moe_)?num_(?:local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"\w*experts_per_tok(?:en)?|moe_k|moe_top_?k|num_selected_experts|top_k_experts", 2),
    (r"\w*n\w*_shared_experts|n_shared_experts", 1),
    (r"n_group|topk_group|n_groups|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"\w*lora_rank\w*", 8),
    (r"max_position_embeddings|\w*sliding_window|index_topk|index_n_heads", 128),
    (r"\w*num_nextn\w*|\w*mtp\w*layers\w*", 0),
)
"""Sizes by regular expressions for setting names. The first match counts."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOST = 6
"""Maximum number of layers."""

_DERIVED = {"qk_head_dim", "transformers_version", "architectures", "dtype", "torch_dtype"}
"""Settings derived from others."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": {"head_dim": 16},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [32, 16], "rope_parameters": {"mrope_section": [1, 1, 2]}}
    },
    "gemma4": {
        "text_config": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "glm4v_moe": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hy_v4_vl": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.5},
            "sliding_attention": {"partial_rotary_factor": 0.5},
        },
    },
    "mistral4": {"head_dim": 16},
    "muse_spark": {"audio_config": {"hidden_sizes": [32] * 4, "out_hidden_size": 32}},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "scale_embedding": False},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        }
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "switch_transformers": {"decoder_start_token_id": 0},
    "step3p7": {"text_config": {"sliding_window": 128}},
}
"""Additional settings that an architecture needs."""


def tiny_config(model_type: str, own: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the configuration of a tiny model.

    Args:
        model_type: transformers' name of the architecture.
        own: settings that win over those of the tiny one.

    Raises:
        Exception: any exception that the configuration class raises for an impossible size.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    settings = _shrunk(kind().to_dict())
    return kind(**_merged(_merged(settings, _OWN.get(model_type, {})), own))


def tiny_model(model_type: str, seed: int = 0, own: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a random float32 model in evaluation mode, with non-negligible weights; `own` as for `tiny_config`."""
    from transformers import AutoModelForImageTextToText

    from moepack.checkpoint.classes import model_class

    torch.manual_seed(seed)
    config, kind = tiny_config(model_type, own), model_class({"model_type": model_type})
    if type(config) in AutoModelForImageTextToText._model_mapping:  # the whole model, not its text part
        kind = AutoModelForImageTextToText
    build = getattr(kind, "from_config", None) or kind._from_config
    model = build(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


def _merged(settings: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in own.items():
        inner = settings.get(key)
        settings[key] = _merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return settings


def _shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny configuration, from the defaults of a large one."""
    settings: dict[str, Any] = {}
    layers = config.get("num_hidden_layers")
    kept = _layers(config, layers) if isinstance(layers, int) else []
    for key, value in config.items():
        if key == "per_layer_config":
            inner = {int(layer): settings_of for layer, settings_of in (value or {}).items()}
            settings[key] = {new: _shrunk(inner[old]) for new, old in enumerate(kept) if old in inner}
        elif isinstance(value, dict):
            settings[key] = _shrunk(value) if key.endswith("config") else value
        elif isinstance(value, list) and kept and len(value) == layers:
            settings[key] = [value[layer] for layer in kept]
        elif key == "mlp_only_layers":
            settings[key] = value and value[:1]
        elif key not in _DERIVED:
            settings[key] = _TOKENS.get(key, _size(key, value)) if value is not None else _missing(key)
    if kept:
        settings["num_hidden_layers"] = len(kept)
    if config.get("kv_lora_rank") and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return settings


def _layers(config: Mapping[str, Any], count: int) -> list[int]:
    """Return the indices of at least two layers that include each kind."""
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == count]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([values[layer] for values in lists]), layer)
    kept = sorted(kinds.values())[:_MOST]
    return kept if len(kept) > 1 else [0, min(1, count - 1)]


def _size(name: str, value: Any) -> Any:
    """Return a setting, reduced if it is a size."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((min(value, size) for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)


def _missing(name: str) -> int | None:
    """Return the value for a setting whose default is None: the number of experts, so that the model has some."""
    return {"n_routed_experts": 4, "num_experts_per_tok": 2}.get(name)
