"""Qwen3-MoE (arXiv 2505.09388)."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, NORMED_ATTENTION, gated

register(
    Architecture(
        "qwen3_moe",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": NORMED_ATTENTION, "mlp": gated("mlp")},
        rotatable=True,
    )
)
