"""Mixtral (arXiv 2401.04088)."""

from moepack.checkpoint.architectures.architecture import Architecture, Decoder
from moepack.checkpoint.architectures.common import ATTENTION, FUSED, W123
from moepack.checkpoint.architectures.registry import register

register(
    Architecture(
        "mixtral",
        layouts=(W123, FUSED),
        dense={"attention": ATTENTION},
        block="(?:block_sparse_moe|mlp)",
        rotatable=True,
        decoder=Decoder("mixtral.modeling_mixtral.Mixtral", normalized=True),
    )
)
