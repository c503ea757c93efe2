"""Layouts and layers that several architectures share."""

from dataclasses import replace

from moepack.checkpoint.architectures.architecture import Layout, Linears

__all__ = ["ATTENTION", "FUSED", "GATE_UP_DOWN", "GRANITE", "LATENT_ATTENTION", "NORMED_ATTENTION", "W123", "gated"]

W123 = Layout(
    {
        "experts.{}.w1.weight": ("gate_proj",),
        "experts.{}.w3.weight": ("up_proj",),
        "experts.{}.w2.weight": ("down_proj",),
    }
)
GATE_UP_DOWN = Layout({f"experts.{{}}.{name}.weight": (name,) for name in ("gate_proj", "up_proj", "down_proj")})
FUSED = Layout({"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)})
"""The layout of transformers' own experts modules."""
GRANITE = Layout({"input_linear.weight": ("gate_proj", "up_proj"), "output_linear.weight": ("down_proj",)})

ATTENTION = Linears(
    "self_attn",
    reads=("q_proj", "k_proj", "v_proj"),
    writes=("o_proj",),
    norm="input_layernorm",
    others=(r"[qkv]_proj\.bias", r"rotary_emb\.inv_freq"),
    values=("v_proj", "o_proj"),
)
NORMED_ATTENTION = replace(ATTENTION, others=(*ATTENTION.others, r"[qk]_norm\.weight"))
LATENT_ATTENTION = Linears(
    "self_attn",
    reads=("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    inner=("q_b_proj", "kv_b_proj"),
    writes=("o_proj",),
    norm="input_layernorm",
    others=(r"(?:q_proj|q_a_proj|kv_a_proj_with_mqa)\.bias", r"(?:q|kv)_a_layernorm\.weight", r"rotary_emb\.inv_freq"),
    latent={"q_a_layernorm": "q_b_proj", "kv_a_layernorm": "kv_b_proj"},
    values=("kv_b_proj", "o_proj"),
)


def gated(path: str) -> Linears:
    """A gated feed-forward layer outside the routed experts."""
    return Linears(
        path,
        reads=("gate_proj", "up_proj"),
        writes=("down_proj",),
        norm="post_attention_layernorm",
        channels=("up_proj", "down_proj"),
    )
