"""OLMoE (arXiv 2409.02060)."""

from moepack.checkpoint.architectures.architecture import Architecture, Decoder
from moepack.checkpoint.architectures.common import FUSED, GATE_UP_DOWN, NORMED_ATTENTION
from moepack.checkpoint.architectures.registry import register

register(
    Architecture(
        "olmoe",
        layouts=(GATE_UP_DOWN, FUSED),
        dense={"attention": NORMED_ATTENTION},
        rotatable=True,
        decoder=Decoder("olmoe.modeling_olmoe.Olmoe", head_norms=True),
    )
)
