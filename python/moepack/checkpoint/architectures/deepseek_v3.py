"""DeepSeek-V3 and R1 (arXiv 2412.19437). The router has a bias, and an extra layer predicts the second next token."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, LATENT_ATTENTION, gated

register(
    Architecture(
        "deepseek_v3",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": LATENT_ATTENTION, "shared": gated(r"mlp\.shared_experts"), "mlp": gated("mlp")},
        shared=("shared_experts.",),
    )
)
