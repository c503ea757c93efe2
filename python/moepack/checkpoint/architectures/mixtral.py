"""Mixtral (arXiv 2401.04088)."""

from moepack.checkpoint.architectures.architecture import Architecture, register
from moepack.checkpoint.architectures.common import ATTENTION, FUSED, W123

register(
    Architecture(
        "mixtral",
        layouts=(W123, FUSED),
        dense={"attention": ATTENTION},
        block="(?:block_sparse_moe|mlp)",
        rotatable=True,
    )
)
