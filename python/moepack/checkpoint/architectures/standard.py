"""The names sought in architectures without a description (see `checkpoint.structural`)."""

from moepack.checkpoint.architectures.architecture import Architecture, Linears
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, GRANITE, W123

__all__ = ["STANDARD"]

_READS = ("gate_proj", "up_proj", "gate_up_proj", "input_linear", "wi", "wi_[01]", "w1", "w3")
_WRITES = ("down_proj", "output_linear", "wo", "w2")
_BLOCKS = "(?:mlp|block_sparse_moe|feed_forward)"

STANDARD = Architecture(
    "standard",
    layouts=(FUSED, W123, GATE_UP_DOWN, GRANITE),
    dense={
        "attention": Linears(
            "(?:self_attn|self_attention|attention)",
            reads=("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "[qkv]"),
            inner=("q_b_proj", "kv_b_proj"),
            writes=("o_proj", "out_proj", "o"),
        ),
        "shared": Linears(rf"(?:{_BLOCKS}\.)?shared_\w+", _READS, _WRITES),
        "mlp": Linears("(?:mlp|feed_forward)", _READS, _WRITES),
    },
    block=_BLOCKS,
    router=("gate.", "router."),
    shared=("shared_",),
    stacks={"model.layers": "num_hidden_layers", "model.language_model.layers": "num_hidden_layers"},
    looks_up=False,
    top_k_keys=("num_experts_per_tok", "num_selected_experts", "moe_top_k", "top_k"),
)
