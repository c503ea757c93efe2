"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671)."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import ATTENTION, FUSED, GATE_UP_DOWN, gated

register(
    Architecture(
        "qwen2_moe",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": ATTENTION, "shared": gated(r"mlp\.shared_expert"), "mlp": gated("mlp")},
        shared=("shared_expert.", "shared_expert_gate."),
    )
)
