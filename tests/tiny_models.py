"""Tiny random MoE checkpoints in the hub's layout, a few hundred KB each, created on demand.

`build(architecture, directory, seed)` writes config, bf16 weights (hub names), a byte-level tokenizer and a generation
config. Weights are random, so they can test mechanics but not quality.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

SENTINELS = 26
VOCABULARY = 3 + SENTINELS + 256
HIDDEN, INNER, EXPERTS, LAYERS = 64, 96, 4, 2

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template: the first letter of each role, and the text."""

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def _mixtral() -> torch.nn.Module:
    return MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=EXPERTS, tie_word_embeddings=True))


def _qwen3_moe() -> torch.nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_DECODER, num_experts=EXPERTS, moe_intermediate_size=INNER, head_dim=32, norm_topk_prob=True)
    )


def _deepseek_v2() -> torch.nn.Module:
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**_DECODER, "num_key_value_heads": 2},
            moe_intermediate_size=INNER,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
        )
    )


def _switch() -> torch.nn.Module:
    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=32,
            d_ff=INNER,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=2,
            num_experts=EXPERTS,
            expert_capacity=100_000,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


_MODELS = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek_v2, "switch_transformers": _switch}
ARCHITECTURES = tuple(_MODELS)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with `<pad>` 0, `</s>` 1, `<s>` 2 and T5's sentinels after them."""
    special = ["<pad>", "</s>", "<s>", *(f"<extra_id_{i}>" for i in reversed(range(SENTINELS)))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", model_max_length=2048
    )


def build(architecture: str, directory: Path, seed: int = 0, **save: Any) -> Path:
    """Write a tiny random checkpoint; `save` goes to `save_pretrained` (for example `max_shard_size="50KB"`)."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = _MODELS[architecture]().to(torch.bfloat16)
    torch.random.set_rng_state(state)
    start = {"decoder_start_token_id": 0} if architecture == "switch_transformers" else {"bos_token_id": 2}
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, **start)
    model.save_pretrained(directory, **save)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of single bytes into a checkpoint."""
    _tokenizer().save_pretrained(directory)


def first_layers(model: Path, directory: Path, layers: int) -> Path:
    """Write a copy of a decoder with one file of weights that has only its first layers."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    kept = {name: own for name, own in tensors.items() if "layers." not in name or int(name.split(".")[2]) < layers}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return directory
