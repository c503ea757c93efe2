"""Builds transformers' configuration from the metadata and tensor shapes of a GGUF file.

llama.cpp fixes by architecture what transformers leaves to the configuration (whether top-k weights are normalized).
Each function of `FAMILIES` states these choices. Widths of experts come from the tensors, because older files lack them
in the metadata.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moepack.checkpoint.gguf.model import GgufModel
from moepack.errors import UnsupportedModelError

__all__ = ["FAMILIES", "configuration"]

Config = dict[str, Any]

_SIGMOID = 2
"""llama.cpp's number for routers with sigmoids."""


def configuration(model: GgufModel) -> Config:
    """Return the configuration of a model.

    Raises:
        UnsupportedModelError: the architecture is not in `FAMILIES`, or an entry is missing or not supported. A
            config.json beside the file avoids the latter.
    """
    build = FAMILIES.get(model.architecture)
    advice = "put config.json and the tokenizer of the original model beside the file"
    if build is None:
        message = f"GGUF models of {', '.join(FAMILIES)} are read, not of '{model.architecture}'"
        raise UnsupportedModelError(message, file=model.file)
    try:
        if model.has("rope_freqs.weight"):
            raise UnsupportedModelError("has its own rotary frequencies (rope_freqs.weight)", file=model.file)
        return {**_common(model), **build(model)}
    except UnsupportedModelError as cause:
        raise UnsupportedModelError(f"{cause.detail}; {advice}", file=cause.file, tensor=cause.tensor) from cause


def _common(model: GgufModel) -> Config:
    heads = model.get("attention.head_count")
    special = {
        name: model.optional(f"tokenizer.ggml.{key}")
        for name, key in (("bos_token_id",) * 2, ("eos_token_id",) * 2, ("pad_token_id", "padding_token_id"))
    }
    return {
        "max_position_embeddings": model.get("context_length"),
        "hidden_size": model.get("embedding_length"),
        "num_hidden_layers": model.get("block_count") - model.get("nextn_predict_layers", int, 0),
        "intermediate_size": model.get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("attention.head_count_kv", int, heads),
        "rms_norm_eps": model.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(model),
        "vocab_size": _shape(model, "token_embd.weight")[0],
        "tie_word_embeddings": not model.has("output.weight"),
        "hidden_act": "silu",
        "dtype": "bfloat16",
        **{name: number for name, number in special.items() if number is not None},
    }


def _rope(model: GgufModel) -> Config:
    """Return the settings of rotary positions."""
    rope: Config = {"rope_type": "default", "rope_theta": model.get("rope.freq_base", float, 10_000.0)}
    kind = model.find("rope.scaling.type", str) or "none"
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"has rotary positions of type '{kind}'", file=model.file)
    rope |= {"rope_type": kind, "factor": model.get("rope.scaling.factor", float)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = model.get("rope.scaling.original_context_length")
        rope["beta_fast"] = model.get("rope.scaling.yarn_beta_fast", float, 32.0)
        rope["beta_slow"] = model.get("rope.scaling.yarn_beta_slow", float, 1.0)
    return rope


def _shape(model: GgufModel, name: str) -> tuple[int, ...]:
    if not model.has(name):
        raise UnsupportedModelError(f"has no tensor '{name}'", file=model.file)
    return model.shapes[name]


def _width(model: GgufModel, name: str) -> int:
    """Return the outputs of a matrix of the first layer that has it."""
    found = next((key for key in model.shapes if key.startswith("blk.") and key.endswith(f".{name}.weight")), None)
    if found is None:
        raise UnsupportedModelError(f"has no tensor 'blk.*.{name}.weight'", file=model.file)
    return model.shapes[found][-2]


def _expert_width(model: GgufModel) -> int:
    """Return the inner width of an expert."""
    joined = any(".ffn_gate_up_exps." in name for name in model.shapes)
    return _width(model, "ffn_gate_up_exps") // 2 if joined else _width(model, "ffn_up_exps")


def _head_width(model: GgufModel) -> int:
    usual = model.get("embedding_length") // model.get("attention.head_count")
    width: int = model.find("attention.key_length") or model.get("rope.dimension_count", int, usual)
    return width


def _llama(model: GgufModel) -> Config:
    """Mixtral, or a dense Llama."""
    if not model.find("expert_count"):
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": _head_width(model)}
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "head_dim": _head_width(model),
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "sliding_window": None,
    }


def _routed(model: GgufModel) -> Config:
    return {
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": _expert_width(model),
    }


def _qwen2_moe(model: GgufModel) -> Config:
    return {
        **_routed(model),
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": _width(model, "ffn_up_shexp"),
        "norm_topk_prob": False,
        "qkv_bias": model.has("blk.0.attn_q.bias"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(model: GgufModel) -> Config:
    return {
        **_routed(model),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": _head_width(model),
        "norm_topk_prob": True,
        "attention_bias": model.has("blk.0.attn_q.bias"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(model: GgufModel) -> Config:
    routed = _routed(model)
    return {
        **routed,
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "intermediate_size": routed.pop("moe_intermediate_size"),
        "norm_topk_prob": False,
        "clip_qkv": model.find("attention.clamp_kqv", float),
    }


def _deepseek(model: GgufModel) -> Config:
    """DeepSeek-V2, or V3 if the router has sigmoids."""
    sigmoid = model.get("expert_gating_func", int, 1) == _SIGMOID
    rotary, end = model.get("rope.dimension_count"), "_mla" if model.has("blk.0.attn_k_b.weight") else ""
    keys, values = (model.get(f"attention.{name}_length{end}") for name in ("key", "value"))
    groups, used = model.get("expert_group_count", int, 1), model.get("expert_group_used_count", int, 1)
    rope = _rope(model)
    if multiplier := model.find("rope.scaling.yarn_log_multiplier", float):
        rope |= {"mscale": multiplier / 0.1, "mscale_all_dim": multiplier / 0.1}
    own: Config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": True}
    if not sigmoid:
        method = "greedy" if groups == 1 else "group_limited_greedy"
        own = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}
    return {
        **own,
        "n_routed_experts": model.get("expert_count"),
        "n_shared_experts": model.get("expert_shared_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": _expert_width(model),
        "first_k_dense_replace": model.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": model.get("expert_weights_scale", float, 1.0) or 1.0,
        "norm_topk_prob": model.get("expert_weights_norm", bool, False),
        "n_group": groups,
        "topk_group": used,
        "q_lora_rank": model.find("attention.q_lora_rank"),
        "kv_lora_rank": model.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": values,
        "num_key_value_heads": model.get("attention.head_count"),
        "rope_parameters": rope,
    }


def _gpt_oss(model: GgufModel) -> Config:
    rope = _rope(model)
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": _expert_width(model),
        "head_dim": _head_width(model),
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "sliding_window": model.get("attention.sliding_window"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        "attention_bias": True,
    }


FAMILIES: Mapping[str, Callable[[GgufModel], Config]] = {
    "llama": _llama,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek2": _deepseek,
    "gpt-oss": _gpt_oss,
}
"""By llama.cpp's architecture: returns the settings beyond the common ones."""
