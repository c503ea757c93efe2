"""OLMoE (arXiv 2409.02060)."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, NORMED_ATTENTION

register(
    Architecture(
        "olmoe",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": NORMED_ATTENTION},
        rotatable=True,
    )
)
