"""The names of decoders without a description of their own whose layers are built alike.

Every matrix of a layer reads one of two norms, or is behind an activation:

    x + attention(input_layernorm(x)),    x + experts(post_attention_layernorm(x))

The balanced form of a checkpoint (`checkpoint.balanced`) uses this description for the listed model types. Tests
compare each with its balanced form.
"""

from moepack.checkpoint.architectures.architecture import Architecture
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, NORMED_ATTENTION, W123, gated

__all__ = ["MODEL_TYPES", "PRE_NORMED"]

MODEL_TYPES = frozenset(
    (
        "deepseek_ocr2", "dots1", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flint", "glm4_moe",
        "granitemoe_swa", "hy_v3", "kolibri1", "lara_mini", "mellum", "mimo_v2_flash", "minimax_m2",
        "qwen3_omni_moe_thinker", "solar_open", "unlimited_ocr",
    )
)  # fmt: skip
"""The model types."""

PRE_NORMED = Architecture(
    "pre-normed",
    layouts=(GATE_UP_DOWN, FUSED, W123),
    dense={"attention": NORMED_ATTENTION, "shared": gated(r"mlp\.shared_experts?"), "mlp": gated("mlp")},
    block="(?:mlp|block_sparse_moe)",
    router=("gate.", "router."),
    shared=("shared_expert.", "shared_experts.", "shared_expert_gate."),
)
