"""Phi-3.5-MoE (arXiv 2404.14219). Its norms are layer norms with offsets, which do not commute with rotations."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import ATTENTION, FUSED, W123

register(
    Architecture(
        "phimoe",
        layouts=(W123, FUSED),
        dense={"attention": ATTENTION},
        block="(?:block_sparse_moe|mlp)",
        router=("gate.", "router."),
    )
)
