"""Multi-head latent attention (DeepSeek-V2) in llama.cpp's absorbed form, with one head of keys and values.

llama.cpp multiplies queries by each head's key part of `kv_b_proj`, transposed, and the sums of latents by the value
part. The file therefore stores both parts separately. The key part is written in float32, because its transpose no
longer consists of blocks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moepack.errors import UnsupportedModelError
from moepack.export.gguf.model import Config, Model, Piece, rope_of

__all__ = ["LatentModel"]

DIRECT = (26, 27)
"""Layer counts for which llama.cpp expects queries without a latent. GGUF has no setting for it."""


@dataclass(frozen=True)
class LatentModel(Model):
    """An architecture with latent attention. Attributes as for `Model`."""

    def refuse(self, config: Config) -> None:
        """Reject settings that llama.cpp would compute differently, as for `Model`."""
        super().refuse(config)
        layers, rope = config["num_hidden_layers"], rope_of(config)
        if config.get("q_lora_rank") is None and layers not in DIRECT:
            known = " or ".join(map(str, DIRECT))
            message = (
                f"without q_lora_rank, llama.cpp's '{self.name}' needs {known} layers, but this model has {layers}"
            )
            raise UnsupportedModelError(message, file="config.json")
        scale = rope.get("mscale_all_dim")
        plain = rope.get("attention_factor") is None and rope.get("truncate", True)
        if rope.get("rope_type") == "yarn" and not (scale and rope.get("mscale") == scale and plain):
            message = f"llama.cpp's '{self.name}' needs equal mscale and mscale_all_dim of yarn, and no other scales"
            raise UnsupportedModelError(message, file="config.json")

    def write(self, gguf: Any, writer: Any, config: Config) -> None:
        """Write the hyperparameters."""
        super().write(gguf, writer, config)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        writer.add_expert_weights_norm(False)
        rope = rope_of(config)
        if rope.get("rope_type") == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
            writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])  # llama.cpp divides by 0.1

    def write_attention(self, writer: Any, config: Config) -> None:
        """Write the hyperparameters of attention: of the latents and of the heads."""
        rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        if config.get("q_lora_rank") is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rotary)

    def pieces(self, name: str, rows: int, config: Config) -> list[Piece]:
        """Split `kv_b_proj` into its key and value parts; other tensors as for `Model`."""
        if "attn_kv_b" not in name:
            return super().pieces(name, rows, config)
        keys = config["qk_nope_head_dim"]
        heads = np.arange(rows).reshape(config["num_attention_heads"], keys + config["v_head_dim"])
        stem = name.replace("attn_kv_b", "attn_{}_b")
        return [Piece(stem.format("k"), heads[:, :keys], transposed=True), Piece(stem.format("v"), heads[:, keys:])]
