"""DeepSeek-V2 (arXiv 2405.04434)."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, LATENT_ATTENTION, gated

register(
    Architecture(
        "deepseek_v2",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": LATENT_ATTENTION, "shared": gated(r"mlp\.shared_experts"), "mlp": gated("mlp")},
        shared=("shared_experts.",),
        rotatable=True,
    )
)
